"""`--to coreml` and `--to coreml-int8`: both towers as Core ML packages, for Apple's devices.

They are converted and inspected on any machine. Running them needs a Mac, so elsewhere they are not checked, and the
README and lapclip.json say so.

Shapes are fixed: one image, or one caption padded to the longest there can be. Core ML's own batch predictions take
many of them at once. Numbers are float16, which is what the Neural Engine computes in; in int8 the weights alone are
bytes, with a scale a row.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.errors import WeightsError, first_line
from lapclip.exporting import OUTPUT, ExportFormat, Job, Written, register
from lapclip.exporting.export_folder import copy_example, describe, write_json, write_readme
from lapclip.progress import Status
from lapclip.weights import DESCRIPTION

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from lapclip.embedder import Embedder, Encoder

INPUTS = {"image": "picture", "text": "tokens"}
NOT_CHECKED = "not checked: prediction needs macOS"
ENOUGH = 2048
"""Numbers of a weight that is stored in bytes, and that is looked for in what was converted."""
CLOSE = {False: 1e-3, True: 1.01 / 127}
"""How much a weight may differ, as a share of the largest in its row: float16 keeps 11 bits, a byte 8."""
LEAST = 0.9
"""The share of a tower's large weights, by their numbers, that its package must have room for."""
EXAMPLES = "examples.json"
"""Captions and their tokens, to try a tokenizer of one's own with."""
USE = """\
```
swift example.swift image.jpg
```

`image.mlpackage` takes `picture`, one RGB image; `text.mlpackage` takes `tokens`, int32, one caption padded to the \
longest there can be. Both give `embeddings`, one row of length one. For many at once use Core ML's batch predictions. \
`lapclip.json` says how an image is cut; `tokenizer.json` is for the package swift-transformers."""


class CoreML(ExportFormat):
    """Both towers in float16."""

    purpose = "for Apple's devices"
    engine = "Core ML"
    packages = ("coremltools",)
    extra = "coreml"
    small = False

    def write(self, job: Job) -> Written:
        from lapclip.exporting.tokenizer_files import write_tokenizers

        embedder, folder = job.embedder, job.folder
        notes = write_tokenizers(folder, embedder.tokenizer)
        write_packages(embedder, folder, job.status, small=self.small)
        job.status("verifying the packages")
        structure = verify(folder, embedder, small=self.small)
        notes += structure_notes(structure)
        if not can_predict():
            notes.append(NOT_CHECKED)
        captions = [options[0] for options in job.pairs.held_out.captions[:5]]
        rows = [
            {"caption": text, "symbols": embedder.tokenizer.encode(text, embedder.context)}
            for text in captions
        ]
        (folder / EXAMPLES).write_text(
            json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8", newline="\n"
        )
        towers = interface(embedder)
        weights = [folder / tower["file"] for tower in towers.values()]
        return Written(weights, towers, notes, {"structure": structure})

    def open(self, job: Job) -> Encoder | None:
        return open_packages(job.folder, job.embedder) if can_predict() else None

    def finish(
        self, job: Job, written: Written, check: dict[str, Any], result: dict[str, Any]
    ) -> None:
        about = describe(job.embedder, self.name, written.towers)
        write_json(
            job.folder / DESCRIPTION, {**about, "check": check if can_predict() else NOT_CHECKED}
        )
        copy_example("example.swift", job.folder)
        write_readme(job.folder, job.title, USE, result)

    def next_step(self, folder: Path) -> str:
        return ""


class CoreMLInt8(CoreML):
    """Both towers with weights of a byte each."""

    purpose = "for Apple's devices at half the size"
    small = True


def can_predict() -> bool:
    return sys.platform == "darwin"


def coremltools() -> Any:
    """The package, without its warnings about versions it was not tried with."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as package  # pyright: ignore[reportMissingImports]

    return package


def write_packages(embedder: Embedder, folder: Path, status: Status, *, small: bool) -> None:
    """image.mlpackage and text.mlpackage."""
    import numpy as np
    import torch

    from lapclip.exporting.tower_programs import ImageProgram, TextProgram

    ct = coremltools()
    model, side, context = embedder.model, embedder.view.side, embedder.context
    tokens = torch.from_numpy(embedder.tokenizer.batch(["a red cat on the left"], context))
    padded = torch.full((1, context), embedder.tokenizer.padding, dtype=torch.int32)
    padded[:, : tokens.shape[1]] = tokens
    image = torch.randint(
        0, 256, (1, 3, side, side), generator=torch.Generator().manual_seed(0)
    ).float()
    colours = ct.colorlayout.RGB
    towers = {
        "image": (
            ImageProgram(model, channels_first=True),
            image,
            ct.ImageType(INPUTS["image"], shape=tuple(image.shape), color_layout=colours),
        ),
        "text": (
            TextProgram(model),
            padded,
            ct.TensorType(INPUTS["text"], shape=tuple(padded.shape), dtype=np.int32),
        ),
    }
    for tower, (program, sample, given) in towers.items():
        status(f"converting the {tower} tower")
        try:
            with quietly(), torch.no_grad():
                traced = torch.jit.trace(program.eval(), sample, check_trace=False)
                made: Any = ct.convert(
                    traced,
                    inputs=[given],
                    outputs=[ct.TensorType(OUTPUT, dtype=np.float32)],
                    minimum_deployment_target=ct.target.iOS16,
                    compute_precision=ct.precision.FLOAT16,
                    skip_model_load=not can_predict(),
                )
                if small:
                    made = _in_bytes(made)
        except Exception as error:  # whatever the converter does not know
            raise WeightsError(
                f"The {tower} tower cannot be converted to Core ML: {first_line(error)}.",
                hint="--to onnx",
            ) from error
        made.save(str(folder / f"{tower}.mlpackage"))


@contextmanager
def quietly() -> Iterator[None]:
    """Without the package's own progress bars, dozens of them."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _in_bytes(made: Any) -> Any:
    from coremltools.optimize import coreml  # pyright: ignore[reportMissingImports]

    each = coreml.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=ENOUGH)
    return coreml.linear_quantize_weights(made, coreml.OptimizationConfig(global_config=each))


def open_packages(folder: Path, embedder: Embedder) -> Encoder:
    """The packages of a folder, ready to run on a Mac."""
    import numpy as np
    from PIL import Image

    from lapclip.embedder import Encoder

    class CoreMLEmbedder(Encoder):
        def __init__(self) -> None:
            super().__init__(
                embedder.view, embedder.tokenizer, embedder.context, embedder.embedding
            )
            models = coremltools().models
            self._image, self._text = (
                models.MLModel(str(folder / f"{tower}.mlpackage")) for tower in INPUTS
            )

        def fingerprint(self) -> str:
            return embedder.fingerprint()

        def image_fingerprint(self) -> str:
            return embedder.image_fingerprint()

        def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
            return self._predict(
                self._image, [{INPUTS["image"]: Image.fromarray(row)} for row in pixels_BSSC]
            )

        def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
            padded = np.full((len(tokens_BL), self.context), self.tokenizer.padding, dtype=np.int32)
            padded[:, : tokens_BL.shape[1]] = tokens_BL
            return self._predict(self._text, [{INPUTS["text"]: row[None]} for row in padded])

        @staticmethod
        def _predict(model: Any, inputs: list[dict[str, Any]]) -> np.ndarray:
            found = model.predict(inputs)
            return np.concatenate(
                [np.asarray(one[OUTPUT], dtype=np.float32).reshape(1, -1) for one in found]
            )

    return CoreMLEmbedder()


def interface(embedder: Embedder) -> dict[str, dict[str, Any]]:
    """How each package is called."""
    side = embedder.view.side
    return {
        "image": {
            "file": "image.mlpackage",
            "input": INPUTS["image"],
            "shape": [1, 3, side, side],
            "type": "an RGB image",
            "output": OUTPUT,
        },
        "text": {
            "file": "text.mlpackage",
            "input": INPUTS["text"],
            "shape": [1, embedder.context],
            "type": "int32",
            "output": OUTPUT,
        },
    }


# -- what can be said of packages without running them -----------------------------------------------------------------


def verify(folder: Path, embedder: Embedder, *, small: bool) -> dict[str, Any]:
    """Raises where a package is not what was meant; else how many of its numbers are the tower's own."""
    ct = coremltools()
    found = {}
    for tower, module in (("image", embedder.model.image), ("text", embedder.model.text)):
        made = ct.models.MLModel(str(folder / f"{tower}.mlpackage"), skip_model_load=True)
        _verify_interface(made.get_spec().description, tower, embedder)
        found[tower] = _share_found(module, _weights(made), CLOSE[small])
        numbers, large = found[tower]["numbers"], found[tower]["large"]
        if large and (not found[tower]["found"] or numbers < LEAST * large):
            raise WeightsError(
                f"Of {large:,} numbers of the {tower} tower {found[tower]['found']:,} are in its package, which has "
                f"{numbers:,}. Nothing was kept."
            )
    return found


def structure_notes(structure: dict[str, Any]) -> list[str]:
    """What was found again, for people; a converter may fold a norm into a weight, which is then another."""
    return [
        f"{found['found']:,} of the {found['numbers']:,} numbers in the {tower} package are the model's own, "
        f"which has {found['large']:,} such"
        for tower, found in structure.items()
    ]


def _verify_interface(description: Any, tower: str, embedder: Embedder) -> None:
    (given,), (result,) = description.input, description.output
    side = embedder.view.side
    if tower == "image":
        right = (given.type.imageType.width, given.type.imageType.height) == (side, side)
    else:
        right = list(given.type.multiArrayType.shape) == [1, embedder.context]
    shape = list(result.type.multiArrayType.shape)
    if (
        given.name != INPUTS[tower]
        or result.name != OUTPUT
        or not right
        or shape not in ([], [1, embedder.embedding])
    ):
        raise WeightsError(
            f"The {tower} package came out with another form than asked for. Nothing was kept."
        )


def _weights(made: Any) -> list[np.ndarray]:
    """The matrices of a package, as the numbers that it computes with."""
    import numpy as np
    from coremltools.optimize.coreml import (  # pyright: ignore[reportMissingImports]
        decompress_weights,
        get_weights_metadata,
    )

    with quietly():
        found = get_weights_metadata(decompress_weights(made), ENOUGH)
    return [np.asarray(one.val, dtype=np.float32) for one in found.values()]


def _share_found(tower: nn.Module, weights: list[np.ndarray], close: float) -> dict[str, Any]:
    """Which large weights of the package are one of the tower's, or some rows of one, as it is or transposed."""
    known = [
        weight.detach().float().numpy() for weight in tower.parameters() if weight.numel() >= ENOUGH
    ]
    rows = [matrix for weight in known for matrix in _readings(weight)]
    numbers = 0
    for weight in weights:
        if any(_holds(matrix, reading, close) for reading in _readings(weight) for matrix in rows):
            numbers += weight.size
    return {
        "weights": len(weights),
        "numbers": int(sum(weight.size for weight in weights)),
        "found": int(numbers),
        "large": int(sum(weight.size for weight in known)),
    }


def _readings(weight: np.ndarray) -> list[np.ndarray]:
    flat = weight.reshape(len(weight), -1) if weight.ndim > 1 else weight[None]
    return [flat, flat.T]


def _holds(matrix: np.ndarray, rows: np.ndarray, close: float) -> bool:
    """Whether a matrix has these rows, one after the other."""
    if matrix.shape[1] != rows.shape[1] or len(rows) > len(matrix):
        return False
    room = close * abs(matrix).max() + 1e-7
    for first in (abs(matrix - rows[0]) <= room).all(axis=1).nonzero()[0]:
        if (
            first + len(rows) <= len(matrix)
            and (abs(matrix[first : first + len(rows)] - rows) <= room).all()
        ):
            return True
    return False


register(CoreML("coreml"))
register(CoreMLInt8("coreml-int8"))

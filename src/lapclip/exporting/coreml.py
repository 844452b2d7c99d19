"""Both towers as Core ML packages. They are converted anywhere; predicting with them needs macOS.

Shapes are fixed: one image, or one caption padded to the longest there can be. Core ML's own batch predictions take
many of them at once. Numbers are float16, which is what the Neural Engine computes in; in int8 the weights alone are
bytes, with a scale a row.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lapclip.embedder import Embedder, Encoder
from lapclip.errors import WeightsError, first_line
from lapclip.exporting.onnx_graph import OUTPUT
from lapclip.exporting.tower_programs import ImageProgram, TextProgram

INPUTS = {"image": "picture", "text": "tokens"}
NOT_CHECKED = "not checked: prediction needs macOS"
ENOUGH = 2048
"""Numbers of a weight that is stored in bytes, and that is looked for in what was converted."""


def can_predict() -> bool:
    return sys.platform == "darwin"


def coremltools() -> Any:
    """The package, without its warnings about versions it was not tried with."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as package  # pyright: ignore[reportMissingImports]

    return package


def write_packages(embedder: Embedder, folder: Path, tell: Callable[[str], None], *, small: bool) -> None:
    """image.mlpackage and text.mlpackage."""
    ct = coremltools()
    model, side, context = embedder.model, embedder.view.side, embedder.context
    tokens = torch.from_numpy(embedder.tokenizer.batch(["a red cat on the left"], context))
    padded = torch.full((1, context), embedder.tokenizer.padding, dtype=torch.int32)
    padded[:, : tokens.shape[1]] = tokens
    image = torch.randint(0, 256, (1, 3, side, side), generator=torch.Generator().manual_seed(0)).float()
    colours = ct.colorlayout.RGB
    parts = {
        "image": (
            ImageProgram(model, channels_first=True),
            image,
            ct.ImageType(INPUTS["image"], shape=tuple(image.shape), color_layout=colours),
        ),
        "text": (TextProgram(model), padded, ct.TensorType(INPUTS["text"], shape=tuple(padded.shape), dtype=np.int32)),
    }
    for tower, (program, sample, given) in parts.items():
        tell(f"converting the {tower} tower")
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
                f"The {tower} tower cannot be converted to Core ML: {first_line(error)}.", hint="--to onnx"
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


class CoreMLEmbedder(Encoder):
    """The packages of a folder, on a Mac."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        ct = coremltools()
        super().__init__(embedder.view, embedder.tokenizer, embedder.context, embedder.embedding)
        self._image, self._text = (ct.models.MLModel(str(folder / f"{tower}.mlpackage")) for tower in INPUTS)

    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        return self._predict(self._image, [{INPUTS["image"]: Image.fromarray(row)} for row in pixels_BSSC])

    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        padded = np.full((len(tokens_BL), self.context), self.tokenizer.padding, dtype=np.int32)
        padded[:, : tokens_BL.shape[1]] = tokens_BL
        return self._predict(self._text, [{INPUTS["text"]: row[None]} for row in padded])

    @staticmethod
    def _predict(model: Any, inputs: list[dict[str, Any]]) -> np.ndarray:
        found = model.predict(inputs)
        return np.concatenate([np.asarray(one[OUTPUT], dtype=np.float32).reshape(1, -1) for one in found])


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

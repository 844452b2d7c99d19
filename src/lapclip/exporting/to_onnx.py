"""`--to onnx` and `--to onnx-int8`: both towers as ONNX files, which ONNX Runtime runs without torch.

Batch and caption length are free, nothing else is; where the text tower wants the full length, the batch alone.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.errors import WeightsError, first_line
from lapclip.exporting import OUTPUT, ExportFormat, Job, Written, register
from lapclip.exporting.export_folder import copy_example, describe, write_json, write_readme
from lapclip.progress import Status
from lapclip.suggest import quoted
from lapclip.weights import DESCRIPTION

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lapclip.data.dataset import Pairs
    from lapclip.embedder import Embedder, Encoder

OPSET = 20
INPUTS = {"image": "pixels", "text": "tokens"}
LARGEST = 2_000_000_000
"""Bytes of one file: protobuf, which ONNX is written in, ends at 2 GiB."""
TRIED = "tried"
"""The folder of the towers in float32 and of each int8 step that was tried."""
USE = """\
```
pip install onnxruntime numpy pillow tokenizers
python example.py image.jpg "a dog" "a red car"
```

`image.onnx` takes `pixels`, uint8 (batch, side, side, 3); `text.onnx` takes `tokens`, int64 (batch, length). Both \
give `embeddings`, float32 rows of length one. `lapclip.json` says how an image is cut and a caption written as \
tokens; `tokenizer.json` holds the tokens. `example.py` does both. In Python with lapclip: \
`lapclip.load("FOLDER").encode_image(["image.jpg"])`."""


class Onnx(ExportFormat):
    """Both towers in float32."""

    purpose = "for ONNX Runtime"
    engine = "ONNX Runtime"
    packages = ("onnx", "onnxscript", "onnxruntime")
    extra = "export"

    def write(self, job: Job) -> Written:
        from lapclip.exporting.tokenizer_files import write_tokenizers

        notes = write_tokenizers(job.folder, job.embedder.tokenizer)
        numbers = self._write_towers(job)
        towers = {
            tower: {**about, **numbers[tower]} for tower, about in interface(job.embedder).items()
        }
        written = Written([job.folder / tower["file"] for tower in towers.values()], towers, notes)
        self._describe(job, written)
        return written

    def _write_towers(self, job: Job) -> dict[str, dict[str, Any]]:
        """Write both files, and say of each what its numbers are."""
        from lapclip.exporting.int8 import FLOAT

        return {
            tower: {"numbers": FLOAT} for tower in write_float(job.embedder, job.folder, job.status)
        }

    def _describe(self, job: Job, written: Written, **check: Any) -> None:
        write_json(
            job.folder / DESCRIPTION, {**describe(job.embedder, self.name, written.towers), **check}
        )

    def open(self, job: Job) -> Encoder:
        from lapclip.embedder import open_exported

        return open_exported(job.folder)

    def finish(
        self, job: Job, written: Written, check: dict[str, Any], result: dict[str, Any]
    ) -> None:
        self._describe(job, written, check=check)
        copy_example("example.py", job.folder)
        write_readme(job.folder, job.title, USE, result)

    def next_step(self, folder: Path) -> str:
        return f"python {quoted(str(folder / 'example.py'))} IMAGE CAPTION ..."


class OnnxInt8(Onnx):
    """Both towers in int8; a tower that loses too much in each step stays in float32."""

    purpose = "for a quarter of the size and less time"

    def _write_towers(self, job: Job) -> dict[str, dict[str, Any]]:
        towers = write_int8(job.embedder, job.folder, job.pairs.training, job.status)
        shutil.rmtree(job.folder / TRIED)
        return towers


def write_float(embedder: Embedder, folder: Path, status: Status) -> dict[str, Path]:
    """Write both towers in float32. Return their files."""
    from lapclip.exporting.int8 import prepare
    from lapclip.exporting.tower_programs import programs

    found = {}
    for tower, program in programs(embedder).items():
        status(f"writing the {tower} tower")
        plain, found[tower] = folder / f"{tower}.plain.onnx", folder / f"{tower}.onnx"
        longest = embedder.context if tower == "text" and not embedder.tokenizer.fills else None
        write_graph(program, tower, samples(embedder)[tower], longest, plain)
        prepare(plain, found[tower])
        plain.unlink()
    return found


def write_int8(
    embedder: Embedder, folder: Path, training: Pairs, status: Status
) -> dict[str, dict[str, Any]]:
    """Write both towers in int8. Steps are measured on training pairs; their files stay in `folder`/tried."""
    import numpy as np

    from lapclip.exporting.check import Embedded
    from lapclip.exporting.int8 import FLOAT, quantize, steps_for, try_step

    aside = folder / TRIED
    aside.mkdir()
    graphs = write_float(embedder, aside, status)
    captions = [options[0] for options in training.captions]
    rows = {
        "image": np.array(training.pixels[:]),
        "text": embedder.tokenizer.batch(captions, embedder.context),
    }
    truth = Embedded(
        embedder.encode_pixels(rows["image"]),
        embedder.encode_text(captions),
        np.arange(len(captions)),
    )
    found = {}
    for tower, graph in graphs.items():
        tried = []
        numbers, source = FLOAT, graph
        for step in steps_for(graph):
            status(f"quantizing the {tower} tower, {step}")
            file = aside / f"{tower}.{len(tried)}.onnx"
            quantize(graph, step, file, rows[tower])
            tried.append(try_step(tower, step, file, rows[tower], truth))
            if tried[-1].keeps:
                numbers, source = f"int8, {step}", file
                break
        shutil.copyfile(source, folder / f"{tower}.onnx")
        measured = "; ".join(map(str, tried))
        found[tower] = {
            "numbers": numbers,
            "why": f"{numbers} for the {tower} tower ({measured})",
            "tried": [asdict(one) for one in tried],
        }
    return found


def interface(embedder: Embedder) -> dict[str, dict[str, Any]]:
    """How each file is called."""
    side = embedder.view.side
    length = embedder.context if embedder.tokenizer.fills else f"2 to {embedder.context}"
    return {
        "image": {
            "file": "image.onnx",
            "input": INPUTS["image"],
            "shape": ["batch", side, side, 3],
            "type": "uint8",
            "output": OUTPUT,
        },
        "text": {
            "file": "text.onnx",
            "input": INPUTS["text"],
            "shape": ["batch", length],
            "type": "int64",
            "output": OUTPUT,
        },
    }


def samples(embedder: Embedder) -> dict[str, Tensor]:
    """Inputs to follow a tower with: two images, and two captions of different lengths."""
    import torch

    shape = embedder.model.shape
    pixels = torch.randint(
        0,
        256,
        (2, shape.image_size, shape.image_size, 3),
        generator=torch.Generator().manual_seed(0),
    )
    tokens = embedder.tokenizer.batch(["a red cat on the left", "a dog"], shape.context)
    return {"image": pixels.to(torch.uint8), "text": torch.from_numpy(tokens)}


def write_graph(
    program: nn.Module, tower: str, sample: Tensor, longest: int | None, path: Path
) -> None:
    """Follow the tower on a sample and write what it computes. Captions may have up to so many tokens; None where
    rows have the length of the sample."""
    import onnx
    import torch

    size = sum(part.numel() * part.element_size() for part in program.state_dict().values())
    if size > LARGEST:
        raise WeightsError(
            f"The {tower} tower takes {size / 1e9:.1f} GB, and an ONNX file holds 2.",
            hint="--to huggingface",
        )
    free: dict[int, Any] = {0: torch.export.Dim("batch")}
    if longest is not None:
        free[1] = torch.export.Dim("length", min=2, max=longest)
    try:
        with torch.inference_mode(False), torch.no_grad(), _quietly():
            made = torch.onnx.export(
                program,
                (sample,),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=(free,),
                input_names=[INPUTS[tower]],
                output_names=[OUTPUT],
                verbose=False,
            )
    except Exception as error:  # a foreign network may do what cannot be followed
        raise WeightsError(
            f"The {tower} tower cannot be written as ONNX: {first_line(error)}.",
            hint="--debug shows where",
        ) from error
    assert made is not None
    graph = made.model_proto
    _strip(graph)
    onnx.save(graph, path)


def _strip(graph: Any) -> None:
    """Without the notes about our source, which are larger than a small tower and name this computer's folders."""
    del graph.graph.value_info[:]
    graph.graph.doc_string = ""
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for part in (
        *graph.graph.initializer,
        *graph.graph.input,
        *graph.graph.output,
        graph.graph,
        graph,
    ):
        del part.metadata_props[:]
    graph.producer_name, graph.producer_version = "lapclip", ""


@contextmanager
def _quietly() -> Iterator[None]:
    """torch says which of its own packages are missing, none of which matters here."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


register(Onnx("onnx"))
register(OnnxInt8("onnx-int8"))

"""A tower as an ONNX file: batch and caption length are free, nothing else is."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapclip.data.tokenizers import Tokenizer
from lapclip.embedder import Embedder
from lapclip.errors import WeightsError, first_line

OPSET = 20
INPUTS = {"image": "pixels", "text": "tokens"}
OUTPUT = "embeddings"
LARGEST = 2_000_000_000
"""Bytes of one file: protobuf, which ONNX is written in, ends at 2 GiB."""


def samples(embedder: Embedder) -> dict[str, Tensor]:
    """Inputs to follow a tower with: two images, and two captions of different lengths."""
    shape = embedder.model.shape
    pixels = torch.randint(
        0, 256, (2, shape.image_size, shape.image_size, 3), generator=torch.Generator().manual_seed(0)
    )
    return {"image": pixels.to(torch.uint8), "text": sample_tokens(embedder.tokenizer, shape.context)}


def sample_tokens(tokenizer: Tokenizer, context: int) -> Tensor:
    return torch.from_numpy(tokenizer.batch(["a red cat on the left", "a dog"], context))


def write_graph(program: nn.Module, tower: str, sample: Tensor, context: int, path: Path) -> None:
    """Follow the tower on a sample and write what it computes."""
    size = sum(part.numel() * part.element_size() for part in program.state_dict().values())
    if size > LARGEST:
        raise WeightsError(
            f"The {tower} tower takes {size / 1e9:.1f} GB, and an ONNX file holds 2.", hint="--to huggingface"
        )
    free: dict[int, Any] = {0: torch.export.Dim("batch")}
    if tower == "text":
        free[1] = torch.export.Dim("length", min=2, max=context)
    import onnx

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
            f"The {tower} tower cannot be written as ONNX: {first_line(error)}.", hint="--debug shows where"
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
    for part in (*graph.graph.initializer, *graph.graph.input, *graph.graph.output, graph.graph, graph):
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

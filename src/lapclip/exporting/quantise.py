"""Towers in int8, several ways, to choose from by measuring.

dynamic   the weights of products are stored in a byte each, a scale a column; what they are multiplied with is rounded
          as it comes, with a scale of its own for each call
static    the same for convolutions as well, with scales for what flows between them taken once from training pairs
weights   weights are stored in a byte each and products are in float32: small, as fast as float32, and close to it

The first two have steps in which some products stay in float32, for towers that lose too much otherwise.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.exporting.compact_graph import make_compact, make_tidy
from lapclip.machine.facts import processor

DYNAMIC, STATIC, WEIGHTS = "dynamic", "static", "weights"
BOUNDS = ("Clip", "Relu")
"""What follows a product and bounds it. Rounded with it, the scale is that of what is left, not of what is cut off."""
NO_OVERFLOW = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "dotprod", "neon", "asimd")
"""Processors with one of these add products of bytes in 32 bits. Others by Intel and AMD do so in 16 and overflow."""
AT_ONCE = 8
"""Images that static scales are taken from at a time."""


@dataclass(frozen=True)
class Way:
    """A form of a tower in int8, and which of its products stay in float32."""

    kind: str
    first: int = 0
    """One part in so many, from the input on: what these lose, all later ones see. 0 is none."""
    narrowing: bool = False
    """Those that bring many numbers to fewer, as after a wide activation, where a few numbers dwarf the others."""

    def __str__(self) -> str:
        left = [f"the first 1/{self.first} of products"] if self.first else []
        left += ["narrowing products"] if self.narrowing else []
        return f"{self.kind} without {' and '.join(left)}" if left else self.kind


def ladder(graph: Path) -> list[list[Way]]:
    """How a tower could be quantised: steps to try in this order until one keeps its embeddings.

    With convolutions static alone, because their dynamic form is slow.
    """
    import onnx

    kinds = {node.op_type for node in onnx.load(graph, load_external_data=False).graph.node}
    if "Conv" in kinds:
        steps = [[Way(STATIC)], [Way(STATIC, first=8)], [Way(STATIC, first=4)]]
    else:
        both = [Way(DYNAMIC), Way(STATIC)]
        steps = [both, [Way(DYNAMIC, narrowing=True)], [Way(DYNAMIC, first=4, narrowing=True)]]
    return [*steps, [Way(WEIGHTS)]]


def quantise(graph: Path, way: Way, made: Path, inputs: np.ndarray) -> None:
    """Write a tower in int8. `inputs` are what static scales are taken from."""
    with _quietly():
        if way.kind == STATIC:
            _static(graph, way, made, inputs)
        elif way.kind == DYNAMIC:
            _dynamic(graph, way, made)
        else:
            shutil.copyfile(graph, made)
    make_compact(made, weights=way.kind == WEIGHTS)


def _products(contents: Any, way: Way) -> tuple[list[Any], list[Any]]:
    """Products with weights that are rounded, and those that stay, in order."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in contents.initializer}
    found = [node for node in contents.node if node.op_type in ("Conv", "MatMul", "Gemm") and node.input[1] in sizes]
    few = len(found) // way.first if way.first else 0

    def narrows(node: Any) -> bool:
        return node.op_type == "MatMul" and sizes[node.input[1]][0] > sizes[node.input[1]][-1]

    stay = [at < few or (way.narrowing and narrows(node)) for at, node in enumerate(found)]
    rounded = [node for node, stays in zip(found, stay, strict=True) if not stays]
    return rounded, [node for node, stays in zip(found, stay, strict=True) if stays]


def prepare(graph: Path, made: Path) -> None:
    """What is the same for every input computed once, such as weights that are standardised or laid out otherwise."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(made)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    make_tidy(made)


def reduces_range() -> bool:
    """Whether weights take 7 bits here, because products of 8 could overflow."""
    features = processor().features
    return features is not None and not any(feature in NO_OVERFLOW for feature in features)


def _dynamic(graph: Path, way: Way, made: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _, stay = _products(onnx.load(graph).graph, way)
    quantize_dynamic(
        graph,
        made,
        op_types_to_quantize=["MatMul"],
        # The package makes a product named so of each Gemm before it looks at names.
        nodes_to_exclude=[f"{node.name}_MatMul" if node.op_type == "Gemm" else node.name for node in stay],
        per_channel=True,
        reduce_range=reduces_range(),
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


def _static(graph: Path, way: Way, made: Path, inputs: np.ndarray) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    contents = onnx.load(graph).graph
    name = contents.input[0].name
    rounded, _ = _products(contents, way)
    results = {node.output[0] for node in rounded}
    bounds = [node for node in contents.node if node.op_type in BOUNDS and node.input[0] in results]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._left = iter([inputs[at : at + AT_ONCE] for at in range(0, len(inputs), AT_ONCE)])

        def get_next(self) -> dict[str, np.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            part = next(self._left, None)
            return None if part is None else {name: part}

    quantize_static(
        graph,
        made,
        Reader(),
        quant_format=QuantFormat.QDQ,
        nodes_to_quantize=[node.name for node in (*rounded, *bounds)],
        per_channel=True,
        reduce_range=reduces_range(),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """The package warns about steps that were taken already."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)

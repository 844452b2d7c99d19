"""Towers in int8, several ways, to choose from by measuring.

dynamic   the weights of products are stored in a byte each, a scale a column; what they are multiplied with is rounded
          as it comes, with a scale of its own for each call
static    the same for convolutions as well, with scales for what flows between them taken once from training pairs
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lapclip.export.compact import make_compact, make_tidy
from lapclip.machine.processor import processor

DYNAMIC, STATIC = "dynamic", "static"
NO_OVERFLOW = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "dotprod", "neon", "asimd")
"""Processors with one of these add products of bytes in 32 bits. Others by Intel and AMD do so in 16 and overflow."""
AT_ONCE = 8
"""Pictures that static scales are taken from at a time."""


def ways_for(graph: Path) -> list[str]:
    """How a tower could be quantised: with convolutions static alone, because their dynamic form is slow."""
    import onnx

    kinds = {node.op_type for node in onnx.load(graph, load_external_data=False).graph.node}
    return [STATIC] if "Conv" in kinds else [DYNAMIC, STATIC]


def quantise(graph: Path, way: str, made: Path, inputs: np.ndarray) -> None:
    """Write a tower in int8. `inputs` are what static scales are taken from."""
    with _quietly():
        if way == STATIC:
            _static(graph, made, inputs)
        else:
            _dynamic(graph, made)
    make_compact(made)


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


def _dynamic(graph: Path, made: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        graph,
        made,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        reduce_range=reduces_range(),
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


def _static(graph: Path, made: Path, inputs: np.ndarray) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    contents = onnx.load(graph).graph
    name = contents.input[0].name
    constants = {tensor.name for tensor in contents.initializer}
    products = [
        node.name
        for node in contents.node
        if node.op_type == "Conv" or (node.op_type in ("MatMul", "Gemm") and node.input[1] in constants)
    ]

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
        nodes_to_quantize=products,
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

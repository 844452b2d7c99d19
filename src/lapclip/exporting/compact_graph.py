"""An int8 graph without what makes small models large: float tables beside the products, long names, known shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FEWEST = 512
"""Numbers of a table that is worth storing in fewer bytes."""
DELICATE = 32_768
"""Numbers of a convolution's weights below which a byte each loses more than it saves: early ones, one a channel."""
PRODUCTS = ("Conv", "MatMul", "Gemm")


def make_compact(path: Path, *, weights: bool = False) -> None:
    """Rewrite a graph so that it computes the same from fewer bytes.

    Weights of products that are in float32 are stored in two bytes each; with `weights`, in one.
    """
    import onnx

    model = onnx.load(path)
    graph = model.graph
    _store_small(graph, weights=weights)
    _short_names(graph)
    _tidy(model)
    onnx.save(model, path)


def make_tidy(path: Path) -> None:
    """Rewrite a graph without what other tools left in it."""
    import onnx

    model = onnx.load(path)
    _tidy(model)
    onnx.save(model, path)


def _tidy(model: Any) -> None:
    """Without shapes, which the int8 step stumbles on, and without sets of operations that nothing uses."""
    del model.graph.value_info[:]
    used = {node.domain for node in model.graph.node} | {""}
    kept = [one for one in model.opset_import if one.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _store_small(graph: Any, *, weights: bool) -> None:
    """Weights, positions and the like in fewer bytes, turned back when the engine opens the file.

    The engine does a cast and a product of constants once; it would repeat a DequantizeLinear on every call.
    """
    import onnx
    from onnx import numpy_helper

    products = {node.input[1] for node in graph.node if node.op_type in PRODUCTS}
    made = []
    for tensor in list(graph.initializer):
        if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) < FEWEST or len(tensor.dims) < 2:
            continue
        values, name = numpy_helper.to_array(tensor), tensor.name
        convolves = values.ndim == 4
        rows = values.reshape(len(values), -1) if convolves else values.reshape(-1, values.shape[-1])
        coarse = weights and not (convolves and values.size < DELICATE) if name in products else True
        if coarse and len(rows) > 1 and rows.shape[1] >= 16:  # else a scale each would take what the bytes save
            stored, steps = _in_bytes(rows, values.shape, name)
        elif name in products and np.abs(values).max() < np.finfo(np.float16).max:
            stored = [numpy_helper.from_array(values.astype(np.float16), f"{name}.half")]
            steps = [onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=onnx.TensorProto.FLOAT)]
        else:
            continue
        graph.initializer.remove(tensor)
        graph.initializer.extend(stored)
        made += steps
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _in_bytes(rows: np.ndarray, shape: tuple[int, ...], name: str) -> tuple[list[Any], list[Any]]:
    """What is stored of rows, a byte a number and a scale a row, and the steps back to what has this name."""
    import onnx
    from onnx import numpy_helper

    scale = (np.abs(rows).max(axis=1, keepdims=True).clip(1e-12) / 127).astype(np.float32)
    small = np.round(rows / scale).astype(np.int8)
    stored = [numpy_helper.from_array(small, f"{name}.bytes"), numpy_helper.from_array(scale, f"{name}.scale")]
    flat = name if rows.shape == shape else f"{name}.rows"
    steps = [
        onnx.helper.make_node("Cast", [f"{name}.bytes"], [f"{name}.whole"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Mul", [f"{name}.whole", f"{name}.scale"], [flat]),
    ]
    if flat != name:
        stored.append(numpy_helper.from_array(np.array(shape, dtype=np.int64), f"{name}.shape"))
        steps.append(onnx.helper.make_node("Reshape", [flat, f"{name}.shape"], [name]))
    return stored, steps


def _short_names(graph: Any) -> None:
    """Numbers for names, but for the inputs and outputs that others call."""
    kept = {one.name for one in (*graph.input, *graph.output)} | {""}
    short: dict[str, str] = {}

    def named(name: str) -> str:
        return name if name in kept else short.setdefault(name, f"{len(short):x}")

    for tensor in graph.initializer:
        tensor.name = named(tensor.name)
    for node in graph.node:
        node.name = ""
        for names in (node.input, node.output):
            names[:] = [named(name) for name in names]

"""An int8 graph without what makes small models large: float tables beside the products, long names, known shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FEWEST, MOST = 512, 200_000
"""Numbers of a table that is worth a byte each, and above which turning it back on every call would take time."""


def make_compact(path: Path) -> None:
    """Rewrite a graph so that it computes the same from fewer bytes."""
    import onnx

    model = onnx.load(path)
    graph = model.graph
    _tables_in_bytes(graph)
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


def _tables_in_bytes(graph: Any) -> None:
    """Positions and the like, a byte a number and a scale a row, turned back where they are used."""
    import onnx
    from onnx import numpy_helper

    made, added = [], []
    for tensor in list(graph.initializer):
        if (
            tensor.data_type != onnx.TensorProto.FLOAT
            or not FEWEST <= np.prod(tensor.dims) <= MOST
            or len(tensor.dims) < 2
        ):
            continue
        values = numpy_helper.to_array(tensor)
        rows = values.reshape(-1, values.shape[-1])
        scale = (np.abs(rows).max(axis=1).clip(1e-12) / 127).astype(np.float32)
        if len(rows) == 1 or rows.shape[1] < 16:  # a scale each would take what the bytes save
            continue
        small = np.round(rows / scale[:, None]).astype(np.int8)
        name = tensor.name
        graph.initializer.remove(tensor)
        added += [numpy_helper.from_array(small, f"{name}.bytes"), numpy_helper.from_array(scale, f"{name}.scale")]
        flat = name if rows.shape == values.shape else f"{name}.rows"
        made.append(onnx.helper.make_node("DequantizeLinear", [f"{name}.bytes", f"{name}.scale"], [flat], axis=0))
        if flat != name:
            added.append(numpy_helper.from_array(np.array(values.shape, dtype=np.int64), f"{name}.shape"))
            made.append(onnx.helper.make_node("Reshape", [flat, f"{name}.shape"], [name]))
    graph.initializer.extend(added)
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


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

"""Towers in int8: the first of three steps that keeps the embeddings.

1. Weights and activations in int8. In towers with convolutions, the scales of activations are computed once from
   training pairs (static), because ONNX Runtime's dynamic form of convolutions is slow. In other towers each call
   computes its own (dynamic).
2. The same without the products that lose most: of static towers the first eighth, because all later ones see what
   these lose; of dynamic towers those from many numbers to fewer, as after a wide activation, where a few numbers dwarf
   the others.
3. Weights alone: small, as fast as float32, and close to it.

A tower that no step keeps stays in float32. Steps are measured on training pairs; held-out pairs, which the export is
checked on, have no say.
"""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapclip.embedder import OnnxSession
from lapclip.exporting.check import LEAST_COSINE, MOST_LOST, Embedded, cosines, recall_lost

DYNAMIC, STATIC, WEIGHTS = "dynamic", "static", "weights"
FLOAT = "float32"
SPARED_SHARE = 8  # one in so many products of a static tower stays in float32 in the second step
BOUNDS = ("Clip", "Relu")
"""Operations that bound a product. Quantized with it, the scale is that of what is left, not of what is cut off."""
CALIBRATION_BATCH = 8
MEASURE_BATCH = 32
HELD_OUT_MARGIN = 0.1
"""Share of the cosine that may be lost which is left for held-out pairs, since they may lose a little more."""
MIN_TABLE_SIZE = 512  # numbers from which on a table is stored in fewer bytes
MIN_CONVOLUTION_SIZE = 32_768
"""Numbers of a convolution's weights below which a byte each loses more than it saves: early ones, one a channel."""
PRODUCTS = ("Conv", "MatMul", "Gemm")


@dataclass(frozen=True)
class Step:
    """A form of a tower in int8."""

    kind: str
    spares: bool = False
    """Whether the products that lose most stay in float32."""

    def __str__(self) -> str:
        if not self.spares:
            return self.kind
        spared = {STATIC: f"the first 1/{SPARED_SHARE} of products", DYNAMIC: "narrowing products"}
        return f"{self.kind} without {spared[self.kind]}"


def steps_for(graph: Path) -> list[Step]:
    """Return the steps to try, in order."""
    import onnx

    operations = {node.op_type for node in onnx.load(graph, load_external_data=False).graph.node}
    kind = STATIC if "Conv" in operations else DYNAMIC
    return [Step(kind), Step(kind, spares=True), Step(WEIGHTS)]


def quantize(graph: Path, step: Step, made: Path, inputs: np.ndarray) -> None:
    """Write a tower in int8. Static scales are computed from `inputs`."""
    with _quietly():
        if step.kind == STATIC:
            _static(graph, step, made, inputs)
        elif step.kind == DYNAMIC:
            _dynamic(graph, step, made)
        else:
            shutil.copyfile(graph, made)
    make_compact(made, weights=step.kind == WEIGHTS)


def _split_products(contents: Any, step: Step) -> tuple[list[Any], list[Any]]:
    """Return the products with weights that are quantized, and those that stay in float32."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in contents.initializer}
    products = [
        node for node in contents.node if node.op_type in PRODUCTS and node.input[1] in sizes
    ]
    if not step.spares:
        return products, []
    if step.kind == STATIC:
        count = len(products) // SPARED_SHARE
        return products[count:], products[:count]
    quantized, spared = [], []
    for node in products:
        shape = sizes[node.input[1]]
        narrows = node.op_type == "MatMul" and shape[0] > shape[-1]
        (spared if narrows else quantized).append(node)
    return quantized, spared


def prepare(graph: Path, made: Path) -> None:
    """What is the same for every input computed once, such as weights that are standardised or laid out otherwise."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(made)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    model = onnx.load(made)
    _tidy(model)
    onnx.save(model, made)


def reduces_range() -> bool:
    """Return whether weights take 7 bits here.

    Intel and AMD processors without VNNI add products of bytes in 16 bits, which can overflow.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and not torch.cpu._is_vnni_supported()


def _dynamic(graph: Path, step: Step, made: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _, spared = _split_products(onnx.load(graph).graph, step)
    quantize_dynamic(
        graph,
        made,
        op_types_to_quantize=["MatMul"],
        nodes_to_exclude=[node.name for node in spared],
        per_channel=True,
        reduce_range=reduces_range(),
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


def _static(graph: Path, step: Step, made: Path, inputs: np.ndarray) -> None:
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    contents = onnx.load(graph).graph
    name = contents.input[0].name
    quantized, _ = _split_products(contents, step)
    results = {node.output[0] for node in quantized}
    bounds = [node for node in contents.node if node.op_type in BOUNDS and node.input[0] in results]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            firsts = range(0, len(inputs), CALIBRATION_BATCH)
            self._left = iter([inputs[at : at + CALIBRATION_BATCH] for at in firsts])

        def get_next(self) -> dict[str, np.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            part = next(self._left, None)
            return None if part is None else {name: part}

    quantize_static(
        graph,
        made,
        Reader(),
        quant_format=QuantFormat.QDQ,
        nodes_to_quantize=[node.name for node in (*quantized, *bounds)],
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


# -- which step is taken -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """Measurements of one step."""

    step: str
    cosine: float
    """Mean over training pairs, to the model's own embeddings."""
    recall_lost: float
    """Lost text-to-image R@1 among training pairs, with the other tower as it was."""
    by_chance: float
    """Part of it that chance explains."""

    @property
    def keeps(self) -> bool:
        """Whether cosine and recall are kept."""
        least = LEAST_COSINE + HELD_OUT_MARGIN * (1 - LEAST_COSINE)
        return self.cosine >= least and self.recall_lost <= MOST_LOST + self.by_chance

    def __str__(self) -> str:
        lost = 0.0 - 100 * self.recall_lost
        return f"{self.step}: cosine {self.cosine:.4f}, R@1 {lost:+.1f} points"


def try_step(tower: str, step: Step, file: Path, rows: np.ndarray, truth: Embedded) -> Tried:
    """Measure a step on rows of training inputs. `truth` has their embeddings by the model itself."""
    session = OnnxSession(file)
    firsts = range(0, len(rows), MEASURE_BATCH)
    after = np.concatenate([session(rows[at : at + MEASURE_BATCH]) for at in firsts])
    if tower == "image":
        before, changed = truth.images, replace(truth, images=after)
    else:
        before, changed = truth.texts, replace(truth, texts=after)
    return Tried(str(step), cosines(before, after)["mean"], *recall_lost(truth, changed))


# -- graphs in fewer bytes ---------------------------------------------------------------------------------------------


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
        if (
            tensor.data_type != onnx.TensorProto.FLOAT
            or np.prod(tensor.dims) < MIN_TABLE_SIZE
            or len(tensor.dims) < 2
        ):
            continue
        values, name = numpy_helper.to_array(tensor), tensor.name
        convolves = values.ndim == 4
        rows = (
            values.reshape(len(values), -1) if convolves else values.reshape(-1, values.shape[-1])
        )
        coarse = (
            weights and not (convolves and values.size < MIN_CONVOLUTION_SIZE)
            if name in products
            else True
        )
        if (
            coarse and len(rows) > 1 and rows.shape[1] >= 16
        ):  # else a scale each would take what the bytes save
            stored, steps = _in_bytes(rows, values.shape, name)
        elif name in products and np.abs(values).max() < np.finfo(np.float16).max:
            stored = [numpy_helper.from_array(values.astype(np.float16), f"{name}.half")]
            steps = [
                onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=onnx.TensorProto.FLOAT)
            ]
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
    stored = [
        numpy_helper.from_array(small, f"{name}.bytes"),
        numpy_helper.from_array(scale, f"{name}.scale"),
    ]
    flat = name if rows.shape == shape else f"{name}.rows"
    steps = [
        onnx.helper.make_node(
            "Cast", [f"{name}.bytes"], [f"{name}.whole"], to=onnx.TensorProto.FLOAT
        ),
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

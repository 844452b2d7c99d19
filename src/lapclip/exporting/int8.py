"""Towers in int8: made in several ways, made small, and chosen by measuring.

dynamic   the weights of products are stored in a byte each, a scale a column; what they are multiplied with is rounded
          as it comes, with a scale of its own for each call
static    the same for convolutions as well, with scales for what flows between them taken once from training pairs
weights   weights are stored in a byte each and products are in float32: small, as fast as float32, and close to it

The first two have steps in which some products stay in float32, for towers that lose too much otherwise. The fastest of
those that keep a tower's embeddings on training pairs is taken. Held-out pairs have no say in it: a tower that then
fails the check on them goes back to float32 (`to_onnx.py`), which is the one thing that they decide.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.embedder import Embedder, OnnxSession
from lapclip.exporting.check import (
    LEAST_COSINE,
    MOST_LOST,
    Embedded,
    cosines,
    recall_lost,
    run_tower,
)
from lapclip.machine.facts import processor
from lapclip.measure.timing import MIN_SPEEDUP, Timer

DYNAMIC, STATIC, WEIGHTS = "dynamic", "static", "weights"
BOUNDS = ("Clip", "Relu")
"""What follows a product and bounds it. Rounded with it, the scale is that of what is left, not of what is cut off."""
NO_OVERFLOW = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "dotprod", "neon", "asimd")
"""Processors with one of these add products of bytes in 32 bits. Others by Intel and AMD do so in 16 and overflow."""
SCALED_AT_ONCE = 8
"""Images that static scales are taken from at a time."""
FLOAT = "float32"
AT_ONCE = 32
"""Rows that a form of a tower is measured on at a time."""
IN_HAND = 0.1
"""Share of the cosine that may be lost which is left for held-out pairs, since they may lose a little more."""
FEWEST = 512
"""Numbers of a table that is worth storing in fewer bytes."""
DELICATE = 32_768
"""Numbers of a convolution's weights below which a byte each loses more than it saves: early ones, one a channel."""
PRODUCTS = ("Conv", "MatMul", "Gemm")


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
    found = [node for node in contents.node if node.op_type in PRODUCTS and node.input[1] in sizes]
    few = len(found) // way.first if way.first else 0

    def narrows(node: Any) -> bool:
        return node.op_type == "MatMul" and sizes[node.input[1]][0] > sizes[node.input[1]][-1]

    stay = [at < few or (way.narrowing and narrows(node)) for at, node in enumerate(found)]
    rounded = [node for node, stays in zip(found, stay, strict=True) if not stays]
    return rounded, [node for node, stays in zip(found, stay, strict=True) if stays]


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
        nodes_to_exclude=[
            f"{node.name}_MatMul" if node.op_type == "Gemm" else node.name for node in stay
        ],
        per_channel=True,
        reduce_range=reduces_range(),
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


def _static(graph: Path, way: Way, made: Path, inputs: np.ndarray) -> None:
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    contents = onnx.load(graph).graph
    name = contents.input[0].name
    rounded, _ = _products(contents, way)
    results = {node.output[0] for node in rounded}
    bounds = [node for node in contents.node if node.op_type in BOUNDS and node.input[0] in results]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._left = iter(
                [inputs[at : at + SCALED_AT_ONCE] for at in range(0, len(inputs), SCALED_AT_ONCE)]
            )

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


# -- which form is taken -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """One form of a tower, and what it was measured at."""

    way: str
    cosine: float
    """Mean over training pairs, to the model's own embeddings."""
    recall_lost: float
    """Of text-to-image R@1 among training pairs, with the other tower as it was."""
    by_chance: float
    """What chance explains of it."""
    ms: float
    """One at a time."""

    @property
    def keeps(self) -> bool:
        least = LEAST_COSINE + IN_HAND * (1 - LEAST_COSINE)
        return self.cosine >= least and self.recall_lost <= MOST_LOST + self.by_chance


def try_ways(
    tower: str, embedder: Embedder, files: dict[str, Path], rows: np.ndarray, truth: Embedded
) -> dict[str, Tried]:
    """Measure every form of a tower on rows of training inputs, whose embeddings by the model itself are known."""
    sessions = {way: OnnxSession(path) for way, path in files.items()}
    runs = {way: lambda session=session: session(rows[:1]) for way, session in sessions.items()}
    timer = Timer(rounds=20, min_rounds=5, max_seconds=5.0, warm_up_rounds=3)
    timings = timer.time_in_turns({**runs, "torch": lambda: run_tower(embedder, tower, rows[:1])})
    own = truth.images if tower == "image" else truth.texts
    found = {}
    for way, session in sessions.items():
        after = np.concatenate(
            [session(rows[at : at + AT_ONCE]) for at in range(0, len(rows), AT_ONCE)]
        )
        changed = replace(truth, images=after) if tower == "image" else replace(truth, texts=after)
        found[way] = Tried(
            way,
            cosines(own, after)["mean"],
            *recall_lost(truth, changed),
            1000 * timings[way].median,
        )
    return found


def choose(tower: str, tried: dict[str, Tried]) -> tuple[str, str]:
    """The form to take, and why. float32 is among those tried, and is taken where every other one loses too much."""
    fast = {way: one for way, one in tried.items() if way != FLOAT}
    keeping = [one for one in fast.values() if one.keeps]
    if not keeping:
        best = max(fast.values(), key=lambda one: one.cosine)
        return (
            FLOAT,
            f"the {tower} tower stays in float32: at best ({best.way}) {_measured(best)}, too much lost",
        )
    quickest = min(keeping, key=lambda one: one.ms)
    # Within the noise of timing the closer one is the better one.
    near = [one for one in keeping if one.ms <= MIN_SPEEDUP * quickest.ms]
    chosen = max(near, key=lambda one: one.cosine)
    others = [f"{one.way}: {_measured(one)}" for one in tried.values() if one is not chosen]
    return (
        chosen.way,
        f"{chosen.way} for the {tower} tower: {_measured(chosen)} ({'; '.join(others)})",
    )


def _measured(one: Tried) -> str:
    return (
        f"cosine {one.cosine:.4f}, R@1 {0.0 - 100 * one.recall_lost:+.1f} points, {one.ms:.2f} ms"
    )


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
            or np.prod(tensor.dims) < FEWEST
            or len(tensor.dims) < 2
        ):
            continue
        values, name = numpy_helper.to_array(tensor), tensor.name
        convolves = values.ndim == 4
        rows = (
            values.reshape(len(values), -1) if convolves else values.reshape(-1, values.shape[-1])
        )
        coarse = (
            weights and not (convolves and values.size < DELICATE) if name in products else True
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

"""Both towers as ONNX files, in float32 or in the int8 form that measuring prefers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.data.dataset import Pairs
from lapclip.embedder import Embedder
from lapclip.exporting.check import Embedded
from lapclip.exporting.choose_int8 import FLOAT, as_json, choose, try_ways
from lapclip.exporting.onnx_graph import INPUTS, OUTPUT, samples, write_graph
from lapclip.exporting.quantise import ladder, prepare, quantise
from lapclip.exporting.tower_programs import programs
from lapclip.progress import Status

TRIED = "tried"
"""The folder in which every int8 form lies until the check is done, and the towers in float32."""


def write_float(embedder: Embedder, folder: Path, status: Status, *, small: bool = False) -> dict[str, Path]:
    """Both towers in float32; with `small`, their tables of embeddings in bytes."""
    found = {}
    for tower, program in programs(embedder, small=small).items():
        status(f"writing the {tower} tower")
        plain, found[tower] = folder / f"{tower}.plain.onnx", folder / f"{tower}.onnx"
        write_graph(program, tower, samples(embedder)[tower], embedder.context, plain)
        prepare(plain, found[tower])
        plain.unlink()
    return found


def write_int8(embedder: Embedder, folder: Path, training: Pairs, status: Status) -> dict[str, dict[str, Any]]:
    """Both towers in int8. What was tried is measured on training pairs; its files stay in `folder`/tried."""
    aside = folder / TRIED
    aside.mkdir()
    graphs = write_float(embedder, aside, status, small=True)
    captions = [options[0] for options in training.captions]
    rows = {"image": np.array(training.pixels[:]), "text": embedder.tokenizer.batch(captions, embedder.context)}
    truth = Embedded(embedder.encode_pixels(rows["image"]), embedder.encode_text(captions), np.arange(len(captions)))
    found = {}
    for tower, graph in graphs.items():
        files, tried = {FLOAT: graph}, {}
        for step in ladder(graph):
            for way in step:
                status(f"rounding the {tower} tower to int8, {way}")
                files[str(way)] = aside / f"{tower}.{len(files)}.onnx"
                quantise(graph, way, files[str(way)], rows[tower])
            status(f"measuring the {tower} tower in int8")
            new = {name: path for name, path in files.items() if name not in tried}
            tried.update(try_ways(tower, embedder, new, rows[tower], truth))
            if any(tried[str(way)].keeps for way in step):
                break
        way, why = choose(tower, tried)
        shutil.copyfile(files[way], folder / f"{tower}.onnx")
        found[tower] = {"numbers": FLOAT if way == FLOAT else f"int8, {way}", "why": why, "tried": as_json(tried)}
    return found


def interface(embedder: Embedder) -> dict[str, dict[str, Any]]:
    """How each file is called."""
    side = embedder.view.side
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
            "shape": ["batch", f"2 to {embedder.context}"],
            "type": "int64",
            "output": OUTPUT,
        },
    }

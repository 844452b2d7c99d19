"""The microscope: what the parts of a training step cost on this machine.

Each file measures one thing and returns a small record. `examine` measures all of them with a small model, and `lines`
describes the result for people.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lapclip.config import ModelConfig
from lapclip.errors import first_line
from lapclip.machine.device import Device
from lapclip.microscope import batch_loading, memory_speed, precisions, products, step_phases
from lapclip.microscope.sentences import lines
from lapclip.model.shapes import SHAPES
from lapclip.progress import StageProgress
from lapclip.tuning import memory_probe
from lapclip.tuning.workload import Rehearsal, make_workload

__all__ = ["examine", "lines"]

BATCH = 32


def examine(
    device: Device,
    progress: StageProgress | None = None,
    *,
    shape: ModelConfig = SHAPES["mini"],
    batch_size: int = BATCH,
    loss_steps: int = 50,
    copy_bytes: int = 1 << 28,
    rounds: int = 5,
    workers: int = batch_loading.WORKERS,
    product_size: int = products.SIZE,
) -> dict[str, Any]:
    """Everything, as plain values for JSON: times in seconds or ms as named, sizes in bytes, shares from 0 to 1."""
    workload = make_workload(shape, batch_size, device)
    rehearsal = Rehearsal(workload, device, pairs=4 * batch_size)
    tokens = 1 + (shape.image_size // shape.patch) ** 2
    measurements: dict[str, tuple[str, Callable[[], Any]]] = {
        "product": ("one product", lambda: asdict(products.product_parts(device, product_size, 10 * rounds))),
        "products": ("a hundred products", lambda: asdict(products.many_products(device, product_size, rounds=rounds))),
        "copies": ("copies of memory", lambda: asdict(memory_speed.copy_rates(device, copy_bytes, rounds))),
        "phases": ("the phases of a batch", lambda: asdict(step_phases.batch_phases(rehearsal, rounds))),
        "memory": ("the memory of a step", lambda: asdict(memory_probe.step_memory(workload, device))),
        "cores": ("the use of each core", lambda: asdict(step_phases.core_use(rehearsal, 0.2 * rounds))),
        "threads": ("threads", lambda: asdict(step_phases.thread_times(rehearsal, rounds=rounds))),
        "loaders": (
            "ways to load",
            lambda: _each(batch_loading.loader_times(rehearsal, rounds, (0, min(workers, os.cpu_count() or 1)))),
        ),
        "layouts": (
            "layouts in memory",
            lambda: asdict(
                memory_speed.layout_times(device, batch_size, tokens, shape.image_width, shape.image_heads, rounds)
            ),
        ),
        "precisions": (  # in smaller batches: a processor that does not know float16 is very slow at it
            "precisions",
            lambda: _each(precisions.precisions(shape, max(2, batch_size // 4), device, loss_steps, rounds=rounds)),
        ),
    }
    found: dict[str, Any] = {"device": device.kind, "model": shape.name, "batch": batch_size}
    for number, (key, (what, measure)) in enumerate(measurements.items()):
        if progress:
            progress(number, len(measurements), what)
        try:
            found[key] = measure()
        except Exception as error:  # one that fails is no reason to lose the others
            found[key] = {"error": first_line(error)}
    if progress:
        progress(len(measurements), len(measurements), "")
    return found


def _each(records: dict[str, Any]) -> dict[str, Any]:
    more = {"final_loss"}
    return {
        name: asdict(record) | {key: getattr(record, key) for key in more if hasattr(record, key)}
        for name, record in records.items()
    }

"""The microscope: what the parts of a training step cost on this machine.

Each file looks at one thing and gives back a small record of figures. `examine` looks at all of them with a small model
and `lines` says it in words.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lapclip.config import ModelConfig
from lapclip.errors import first_line
from lapclip.machine.devices import Device
from lapclip.microscope import batch_loading as loading
from lapclip.microscope import copies, layouts, precisions, products
from lapclip.microscope import step_phases as steps
from lapclip.microscope.in_words import lines
from lapclip.model.shapes import SHAPES
from lapclip.progress import StageProgress
from lapclip.tuning import memory_ledger as held
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
    workers: int = loading.WORKERS,
) -> dict[str, Any]:
    """Everything, as plain values for JSON: times in seconds or ms as named, sizes in bytes, shares from 0 to 1."""
    workload = make_workload(shape, batch_size, device)
    rehearsal = Rehearsal(workload, device, pairs=4 * batch_size)
    tokens = 1 + (shape.image_size // shape.patch) ** 2
    looks: dict[str, tuple[str, Callable[[], Any]]] = {
        "product": ("one product", lambda: asdict(products.product_parts(device, rounds=10 * rounds))),
        "products": ("a hundred products", lambda: asdict(products.many_products(device, rounds=rounds))),
        "copies": ("copies of memory", lambda: asdict(copies.copy_rates(device, copy_bytes, rounds))),
        "phases": ("the phases of a batch", lambda: asdict(steps.batch_phases(rehearsal, rounds))),
        "memory": ("the memory of a step", lambda: asdict(held.step_memory(workload, device))),
        "cores": ("the use of each core", lambda: asdict(steps.core_use(rehearsal, 0.2 * rounds))),
        "threads": ("threads", lambda: asdict(steps.thread_times(rehearsal, rounds=rounds))),
        "loaders": (
            "ways to load",
            lambda: _each(loading.loader_times(rehearsal, rounds, (0, min(workers, os.cpu_count() or 1)))),
        ),
        "layouts": (
            "layouts in memory",
            lambda: asdict(
                layouts.layout_times(device, batch_size, tokens, shape.image_width, shape.image_heads, rounds)
            ),
        ),
        "precisions": (  # in smaller batches: a processor that does not know float16 is very slow at it
            "precisions",
            lambda: _each(precisions.precisions(shape, max(2, batch_size // 4), device, loss_steps, rounds=rounds)),
        ),
    }
    found: dict[str, Any] = {"device": device.kind, "model": shape.name, "batch": batch_size}
    for number, (key, (what, look)) in enumerate(looks.items()):
        if progress:
            progress(number, len(looks), what)
        try:
            found[key] = look()
        except Exception as error:  # one look that fails is no reason to lose the others
            found[key] = {"error": first_line(error)}
    if progress:
        progress(len(looks), len(looks), "")
    return found


def _each(records: dict[str, Any]) -> dict[str, Any]:
    more = {"final_loss"}
    return {
        name: asdict(record) | {key: getattr(record, key) for key in more if hasattr(record, key)}
        for name, record in records.items()
    }

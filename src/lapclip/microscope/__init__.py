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
from lapclip.microscope import device_speed, step_phases
from lapclip.model.shapes import SHAPES
from lapclip.progress import StageProgress
from lapclip.tuning import memory_probe
from lapclip.tuning.measure import Rehearsal, make_workload

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
    workers: int = step_phases.WORKERS,
    product_size: int = device_speed.SIZE,
) -> dict[str, Any]:
    """Everything, as plain values for JSON: times in seconds or ms as named, sizes in bytes, shares from 0 to 1."""
    workload = make_workload(shape, batch_size, device)
    rehearsal = Rehearsal(workload, device, pairs=4 * batch_size)
    tokens = 1 + (shape.image_size // shape.patch) ** 2
    measurements: dict[str, tuple[str, Callable[[], Any]]] = {
        "product": (
            "one product",
            lambda: asdict(device_speed.product_parts(device, product_size, 10 * rounds)),
        ),
        "products": (
            "a hundred products",
            lambda: asdict(device_speed.many_products(device, product_size, rounds=rounds)),
        ),
        "copies": (
            "copies of memory",
            lambda: asdict(device_speed.copy_rates(device, copy_bytes, rounds)),
        ),
        "phases": (
            "the phases of a batch",
            lambda: asdict(step_phases.batch_phases(rehearsal, rounds)),
        ),
        "memory": (
            "the memory of a step",
            lambda: asdict(memory_probe.step_memory(workload, device)),
        ),
        "cores": (
            "the use of each core",
            lambda: asdict(step_phases.core_use(rehearsal, 0.2 * rounds)),
        ),
        "threads": ("threads", lambda: asdict(step_phases.thread_times(rehearsal, rounds=rounds))),
        "loaders": (
            "ways to load",
            lambda: _each(
                step_phases.loader_times(rehearsal, rounds, (0, min(workers, os.cpu_count() or 1)))
            ),
        ),
        "layouts": (
            "layouts in memory",
            lambda: asdict(
                device_speed.layout_times(
                    device, batch_size, tokens, shape.image_width, shape.image_heads, rounds
                )
            ),
        ),
        "precisions": (  # in smaller batches: a processor that does not know float16 is very slow at it
            "precisions",
            lambda: _each(
                step_phases.precisions(
                    shape, max(2, batch_size // 4), device, loss_steps, rounds=rounds
                )
            ),
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


def lines(found: dict[str, Any]) -> list[str]:
    """What `examine` found, one line each: a label of 18 characters, and a sentence."""
    result = []
    for key, describe in SENTENCES.items():
        failed = found[key].get("error")
        sentences = (
            {key: f"could not be measured ({failed})"} if failed else describe(found[key], found)
        )
        result += [f"{label:<18}{text}" for label, text in sentences.items()]
    return result


def _product(product: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    parts = (
        f"{product['total_ms']:.3f} ms: allocate {product['allocate_ms']:.3f}, launch {product['launch_ms']:.3f}, "
        f"arithmetic {product['arithmetic_ms']:.3f}, wait {product['synchronise_ms']:.3f}; the first call "
        f"{product['first_call_ms']:.1f} more"
    )
    return {f"{product['size']}x{product['size']} product": parts}


def _products(many: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    return {
        f"{many['count']} products": f"{many['seconds'] * 1e3:.1f} ms, {many['gflops']:,.0f} GFLOP/s"
    }


def _copies(rates: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    known = {name.replace("_", " "): rate for name, rate in rates.items() if rate}
    return {"copies": ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in known.items())}


def _phases(phases: dict[str, Any], found: dict[str, Any]) -> dict[str, str]:
    total = sum(phases["seconds"].values())
    shares = ", ".join(f"{name} {spent / total:.0%}" for name, spent in phases["seconds"].items())
    return {f"a batch of {found['batch']}": f"{total * 1e3:.0f} ms: {shares}"}


def _memory(memory: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    parts = ", ".join(f"{part} {memory[part] / 1e6:,.0f}" for part in MEMORY_PARTS)
    return {"memory of a step": f"{memory['peak'] / 1e6:,.0f} MB: {parts}"}


def _cores(cores: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    return {"cores in use": " ".join(f"{share:.0%}" for share in cores["cores"])}


def _threads(threads: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    times = threads["seconds"]
    each = ", ".join(f"{count}: {spent * 1e3:.0f} ms" for count, spent in times.items())
    return {"threads": f"{each}; best {min(times, key=times.__getitem__)}"}


def _loaders(ways: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    each = (
        f"{name} {way['seconds'] * 1e3:.0f} ms (first batch {way['start_seconds'] * 1e3:.0f})"
        for name, way in ways.items()
    )
    return {"loading": ", ".join(each)}


def _layouts(layouts: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    return {
        "layout": f"contiguous {layouts['contiguous_ms']:.1f} ms, permuted {layouts['permuted_ms']:.1f} ms"
    }


def _precisions(found: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    return {
        name: precision["error"]
        or f"{precision['seconds'] * 1e3:.0f} ms a step, loss {precision['losses'][0]:.2f} to "
        f"{precision['final_loss']:.2f} in {len(precision['losses'])} steps, {precision['spikes']} spikes"
        for name, precision in found.items()
    }


MEMORY_PARTS = ("process", "parameters", "gradients", "optimizer", "activations", "rest")
SENTENCES: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, str]]] = {
    "product": _product,
    "products": _products,
    "copies": _copies,
    "phases": _phases,
    "memory": _memory,
    "cores": _cores,
    "threads": _threads,
    "loaders": _loaders,
    "layouts": _layouts,
    "precisions": _precisions,
}

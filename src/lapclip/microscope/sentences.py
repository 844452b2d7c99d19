"""What the microscope measured, as lines for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def lines(found: dict[str, Any]) -> list[str]:
    """What `examine` found, one line each: a label of 18 characters, and a sentence."""
    result = []
    for key, describe in SENTENCES.items():
        failed = found[key].get("error")
        sentences = {key: f"could not be measured ({failed})"} if failed else describe(found[key], found)
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
    return {f"{many['count']} products": f"{many['seconds'] * 1e3:.1f} ms, {many['gflops']:,.0f} GFLOP/s"}


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
    return {"layout": f"contiguous {layouts['contiguous_ms']:.1f} ms, permuted {layouts['permuted_ms']:.1f} ms"}


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

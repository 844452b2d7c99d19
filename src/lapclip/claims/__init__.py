"""The published claims, measured again on the machine at hand.

`claims.toml` holds them; each has a measuring function here. Verdicts are made in `judge.py` from figures alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lapclip.claims import accelerator_claims as accelerated
from lapclip.claims import arithmetic_claims as arithmetic
from lapclip.claims import measured_claims as measured
from lapclip.claims import run_claims as finished
from lapclip.claims.bench import Bench
from lapclip.claims.catalogue import Finding, all_claims, row, unknown
from lapclip.errors import ConfigError
from lapclip.machine.devices import default_threads, prepare
from lapclip.progress import StageProgress

MEASURES: dict[int, Callable[[Bench], Finding]] = {
    1: accelerated.one_product,
    2: accelerated.hundred_products,
    3: accelerated.cpu_trains_faster,
    4: accelerated.three_thresholds,
    5: accelerated.free_transfers,
    6: measured.half_precision,
    7: measured.batch_phases,
    8: measured.peak_memory,
    9: measured.checkpoint_size,
    10: measured.best_threads,
    11: measured.loader_workers,
    12: measured.best_batch,
    13: finished.temperature,
    14: finished.gradient_balance,
    15: finished.negatives,
    16: measured.memory_bandwidth,
    17: finished.energy,
    18: finished.heat,
    19: arithmetic.parameter_count,
    20: arithmetic.chance,
    21: measured.attention_mask,
    22: measured.numpy_two,
    23: measured.accumulation,
    24: finished.gpu_run,
    25: accelerated.larger_models,
    26: accelerated.pinning,
    27: arithmetic.loss_slope,
    28: arithmetic.battery,
    29: arithmetic.performance_cores,
    30: measured.contiguous,
}

FIRST = (8,)
"""Measured in a process of its own, while this one holds no model yet: small machines cannot hold both."""


def measure_claims(
    only: Iterable[int] = (), bench: Bench | None = None, progress: StageProgress | None = None
) -> list[dict[str, Any]]:
    """The claims of these numbers, or all, each with its figure here, its verdict and the reason."""
    claims, wanted = all_claims(), set(only)
    if strange := sorted(wanted - {claim.number for claim in claims}):
        raise ConfigError(f"There is no claim {strange[0]}; they go from 1 to {len(claims)}.", hint="lapclip claims")
    chosen = [claim for claim in claims if not wanted or claim.number in wanted]
    bench = bench or Bench()
    prepare(bench.accelerator or bench.cpu, default_threads())  # as training does
    rows = []
    for done, claim in enumerate(sorted(chosen, key=lambda claim: claim.number not in FIRST)):
        if progress:
            progress(done, len(chosen), f"{claim.number}. {claim.claim}")
        rows.append(row(claim, attempt(MEASURES[claim.number], bench)))
    if progress:
        progress(len(chosen), len(chosen), "")
    return sorted(rows, key=lambda one: one["number"])


def attempt(measure: Callable[[Bench], Finding], bench: Bench) -> Finding:
    """One claim. A measurement that fails leaves the others standing, and says what happened."""
    try:
        return measure(bench)
    except Exception as error:  # memory, a sandbox without processes, a driver: the claim is not measured
        text = (str(error).strip().splitlines() or [""])[0]
        return unknown(f"the measurement failed: {type(error).__name__}: {text[:160]}")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The claims as a Markdown table."""
    lines = ["| # | claim | published | here | verdict | why |", "|---|---|---|---|---|---|"]
    for one in rows:
        cells = (one["number"], one["claim"], one["published"], one["here"] or "-", one["verdict"], one["reason"])
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

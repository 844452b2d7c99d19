"""The published claims, measured again on the machine at hand.

`claims.toml` holds them; each has a measuring function here, and a verdict in `judge.py` from what was measured alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lapclip.claims import measured_claims, run_claims
from lapclip.claims.judge import Finding, all_claims, row, unknown
from lapclip.claims.measured_claims import Bench
from lapclip.errors import ConfigError, first_line
from lapclip.machine.choose_device import default_threads, prepare_device
from lapclip.progress import StageProgress

MEASURES: dict[int, Callable[[Bench], Finding]] = {
    1: measured_claims.one_product,
    2: measured_claims.hundred_products,
    3: measured_claims.cpu_trains_faster,
    4: measured_claims.three_thresholds,
    5: measured_claims.free_transfers,
    6: measured_claims.half_precision,
    7: measured_claims.batch_phases,
    8: measured_claims.peak_memory,
    9: measured_claims.checkpoint_size,
    10: measured_claims.best_threads,
    11: measured_claims.loader_workers,
    12: measured_claims.best_batch,
    13: run_claims.temperature,
    14: run_claims.gradient_balance,
    15: run_claims.negatives,
    16: measured_claims.memory_bandwidth,
    17: run_claims.energy,
    18: run_claims.heat,
    19: measured_claims.parameter_count,
    20: measured_claims.chance,
    21: measured_claims.attention_mask,
    22: measured_claims.numpy_two,
    23: measured_claims.accumulation,
    24: run_claims.gpu_run,
    25: measured_claims.larger_models,
    26: measured_claims.pinning,
    27: measured_claims.loss_slope,
    28: measured_claims.battery,
    29: measured_claims.performance_cores,
    30: measured_claims.contiguous,
}

FIRST = (8,)
"""Measured in a process of its own, while this one holds no model yet: small machines cannot hold both."""


def measure_claims(
    only: Iterable[int] = (), bench: Bench | None = None, progress: StageProgress | None = None
) -> list[dict[str, Any]]:
    """The claims of these numbers, or all, each with its number here, its verdict and the reason."""
    claims, numbers = all_claims(), set(only)
    if strange := sorted(numbers - {claim.number for claim in claims}):
        raise ConfigError(
            f"There is no claim {strange[0]}; they go from 1 to {len(claims)}.",
            hint="lapclip claims",
        )
    chosen = [claim for claim in claims if not numbers or claim.number in numbers]
    bench = bench or Bench()
    prepare_device(bench.accelerator or bench.cpu, default_threads())  # as training does
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
    except (
        Exception
    ) as error:  # memory, a sandbox without processes, a driver: the claim is not measured
        return unknown(f"the measurement failed: {type(error).__name__}: {first_line(error, 160)}")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The claims as a Markdown table."""
    lines = ["| # | claim | published | here | verdict | why |", "|---|---|---|---|---|---|"]
    for one in rows:
        cells = (
            one["number"],
            one["claim"],
            one["published"],
            one["here"] or "-",
            one["verdict"],
            one["reason"],
        )
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

"""The published claims, measured again on this machine.

`claims.toml` has each claim and its published figure. `CHECKS` has how it is measured, and the
function that judges from what was measured alone whether it holds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lapclip.errors import ConfigError, first_line
from lapclip.machine.choose_device import default_threads, prepare_device
from lapclip.progress import Status
from lapclip.tuning.claims import arithmetic, finished_runs, operations, steps
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.claims.finding import UNKNOWN, CannotMeasure, Finding

CLAIMS_FILE = Path(__file__).parent / "claims.toml"


@dataclass(frozen=True)
class Claim:
    """Something published."""

    number: int
    claim: str
    published: str
    kind: str
    """What it takes to measure it: `machine`, `accelerator`, `run` or `arithmetic`."""
    background: str = ""
    """Facts from the public source that explain the published figure."""


@dataclass(frozen=True)
class Check:
    """How a claim is measured, and when it holds."""

    measure: Callable[[Bench], Any]
    """Measures it. Raises CannotMeasure if this machine cannot."""
    judge: Callable[[Any], Finding]
    """Decides from what was measured whether the claim holds."""


CHECKS: dict[int, Check] = {
    1: Check(operations.measure_one_product, operations.judge_one_product),
    2: Check(operations.measure_many_products, operations.judge_many_products),
    3: Check(steps.measure_published_step, steps.judge_cpu_is_faster),
    4: Check(steps.measure_both_sides_of_thresholds, steps.judge_thresholds),
    5: Check(operations.measure_transfer, operations.judge_free_transfer),
    6: Check(steps.time_precisions, steps.judge_half_precision),
    7: Check(steps.measure_phases, steps.judge_phases),
    8: Check(steps.measure_memory, steps.judge_memory),
    9: Check(steps.measure_checkpoint, steps.judge_checkpoint),
    10: Check(steps.time_threads, steps.judge_threads),
    11: Check(steps.measure_loading, steps.judge_workers),
    12: Check(steps.measure_batch_sizes, steps.judge_batch_sizes),
    13: Check(finished_runs.measure_temperature, finished_runs.judge_temperature),
    14: Check(finished_runs.measure_gradient_norms, finished_runs.judge_gradient_norms),
    15: Check(finished_runs.measure_negatives, finished_runs.judge_negatives),
    16: Check(steps.measure_bandwidth, steps.judge_bandwidth),
    17: Check(finished_runs.measure_energy, finished_runs.judge_energy),
    18: Check(finished_runs.measure_heat, finished_runs.judge_heat),
    19: Check(arithmetic.count_written_parameters, arithmetic.judge_parameters),
    20: Check(arithmetic.measure_chance, arithmetic.judge_chance),
    21: Check(operations.try_masks, operations.judge_masks),
    22: Check(operations.try_numpy, operations.judge_numpy),
    23: Check(steps.measure_halved_batch, steps.judge_accumulation),
    24: Check(finished_runs.measure_gpu_run, finished_runs.judge_gpu_run),
    25: Check(steps.measure_larger_step, steps.judge_larger_model),
    26: Check(operations.measure_transfer, operations.judge_pinning),
    27: Check(arithmetic.compute_loss_falls, arithmetic.judge_loss_slope),
    28: Check(arithmetic.compute_watt_hours, arithmetic.judge_battery),
    29: Check(arithmetic.count_m1_cores, arithmetic.judge_m1_cores),
    30: Check(operations.measure_layouts, operations.judge_layouts),
}
MEASURED_FIRST = 8  # in a new process while this one holds no model: small machines cannot hold two


def read_claims() -> list[Claim]:
    """Return the published claims by number."""
    rows = tomllib.loads(CLAIMS_FILE.read_text(encoding="utf-8"))["claims"]
    return [Claim(**row) for row in rows]


def measure_claims(
    numbers: Iterable[int] = (),
    bench: Bench | None = None,
    progress: Status = lambda what: None,
) -> list[dict[str, Any]]:
    """Measure the claims of these numbers, or all, and return a row of JSON for each."""
    claims = {claim.number: claim for claim in read_claims()}
    chosen = sorted(set(numbers) or claims)
    for number in chosen:
        if number not in claims:
            raise ConfigError(
                f"There is no claim {number}; they go from 1 to {len(claims)}.",
                hint="lapclip claims",
            )
    bench = bench or Bench()
    prepare_device(bench.accelerator or bench.cpu, default_threads())
    rows = {}
    for number in sorted(chosen, key=lambda number: number != MEASURED_FIRST):
        claim = claims[number]
        progress(f"{len(rows) + 1}/{len(chosen)}  {number}. {claim.claim}")
        rows[number] = to_row(claim, check_claim(number, bench))
    return [rows[number] for number in chosen]


def check_claim(number: int, bench: Bench) -> Finding:
    """Measure and judge one claim. A measurement that fails does not lose the others."""
    check = CHECKS[number]
    try:
        return check.judge(check.measure(bench))
    except CannotMeasure as reason:
        return Finding(None, UNKNOWN, str(reason))
    except Exception as error:  # memory, a sandbox without processes, a driver
        reason = f"the measurement failed: {type(error).__name__}: {first_line(error, 160)}"
        return Finding(None, UNKNOWN, reason)


def to_row(claim: Claim, finding: Finding) -> dict[str, Any]:
    """Return a claim with its finding, as `lapclip claims --json` prints it."""
    row = {"number": claim.number, "claim": claim.claim, "published": claim.published}
    row |= asdict(finding)
    if claim.background:
        row["reason"] = f"{finding.reason}; {claim.background}"
    return row

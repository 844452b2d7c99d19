"""How long a run will still take, and how sure that is.

The pace of a machine drifts: heat, a battery, another program. So the last steps are cut into stretches, and the range
is where the mean of one more stretch would lie four times in five: as wide as the stretches differ, wider while there
are few of them. It is not divided by the number of steps to come, because a slow stretch may well last. Evaluations
come rarely and at known steps, so they are taken out of the gaps and added for each that is still to come; checkpoints
come by the clock and stay in. Pauses have no gap and do not count.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from lapclip.runs.summary import Summary
from lapclip.text import number

RECENT = 400
"""Steps that the pace is taken from: of 100, 200, 400 and all, the number that erred least on a dozen real runs."""
STRETCHES = 10
LEAST = 3
"""Gaps between steps below which there is nothing to say."""
_FOUR_IN_FIVE = (3.08, 1.89, 1.64, 1.53, 1.48, 1.44, 1.41, 1.40, 1.38)
"""Student's t for the middle 80 %, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Forecast:
    """Seconds of work until the end: expected, and the range that holds about four times in five."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class _Gap:
    seconds: float
    """A step's, without evaluations."""
    steps: int
    """How many it is the mean of: of a long run some steps are left out."""


def forecast(summary: Summary) -> Forecast | None:
    """The time left, or None where there is nothing to tell it from or nothing left to do."""
    gaps = _gaps(summary)
    if summary.ending or len(gaps) < LEAST or not summary.total_steps:
        return None
    left = max(0, summary.total_steps - summary.step)
    pace = _pace(gaps)
    evaluations, spread = _evaluation_seconds(summary)
    to_come = evaluations_to_come(summary)
    size = -(-len(gaps) // STRETCHES)
    # From the newest backwards, so that only the oldest stretch is short; and it counts only if it is half a one.
    stretches = [gaps[max(0, end - size) : end] for end in range(len(gaps), 0, -size)]
    paces = [_pace(stretch) for stretch in stretches if 2 * len(stretch) >= size]
    reach = _FOUR_IN_FIVE[min(len(paces), STRETCHES) - 2] * (1 + 1 / len(paces)) ** 0.5
    margin = left * statistics.stdev(paces) * reach + to_come * spread
    expected = left * pace + to_come * evaluations
    # No machine does its steps faster than the fastest stretch seen, however much the slow ones differ.
    fastest = left * min(paces) * 0.9 + to_come * (evaluations - spread)
    return Forecast(
        expected, max(0.0, min(expected, fastest), expected - margin), expected + margin
    )


def evaluations_to_come(summary: Summary) -> int:
    """Those between epochs, the one after the last step, and the final scores."""
    total, done = summary.total_steps, [int(event["step"]) for event in summary.evaluations]
    apart = [later - earlier for earlier, later in itertools.pairwise(done) if later > earlier]
    epochs = int(number(summary.setting("train", "evaluate_every_epochs")) or 0)
    period = (
        min(apart) if apart else epochs * int(number(summary.started.get("steps_per_epoch")) or 0)
    )
    last = done[-1] if done else 0
    if last >= total:
        return 1
    between = (total - 1) // period - max(last, summary.step - 1) // period if period else 0
    return max(0, between) + 2


def _gaps(summary: Summary) -> list[_Gap]:
    """The latest gaps between steps, each without the evaluation that fell into it."""
    scored: list[dict[str, Any]] = list(summary.evaluations)
    found: list[_Gap] = []
    later: dict[str, Any] | None = None
    for event in reversed(summary.steps):  # the newest first: a long run has many
        if later is not None and later["gap"] is not None:
            steps = max(1, later["step"] - event["step"])
            while scored and scored[-1]["step"] >= later["step"]:
                scored.pop()
            evaluated = 0.0
            while scored and scored[-1]["step"] >= event["step"]:
                evaluated += number(scored.pop().get("seconds")) or 0.0
            found.append(_Gap(max(0.0, later["gap"] - evaluated / steps), steps))
            if len(found) == RECENT:
                break
        later = event
    return found[::-1]


def _pace(gaps: list[_Gap]) -> float:
    """Seconds a step, each step counting once."""
    return sum(gap.seconds * gap.steps for gap in gaps) / sum(gap.steps for gap in gaps)


def _evaluation_seconds(summary: Summary) -> tuple[float, float]:
    """What the latest evaluations took, and by how much they differ."""
    taken = [
        seconds
        for event in summary.evaluations[-5:]
        if (seconds := number(event.get("seconds"))) is not None
    ]
    if not taken:
        return 0.0, 0.0
    return statistics.fmean(taken), statistics.stdev(taken) if len(taken) > 1 else taken[0] / 2

"""Whether every part of the model gets gradients, and such that make sense."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lapclip.runs.events import mapping
from lapclip.runs.findings.checks import (
    LEAST_STEPS,
    RECENT_STEPS,
    TOO_WILD,
    Found,
    Surroundings,
    check,
    contrastive_loss,
    has_learnt_a_while,
    numbers,
    recent,
)
from lapclip.runs.summary import Summary
from lapclip.text import number

TOWERS = ("image", "text")
NOT_A_NUMBER = "is not a number"
"""How the training words it (`src/lapclip/training/recovery.py`)."""
EXPLODED, TOO_LONG = 30, 1000
"""Times the length that gradients had at first, and their length. Healthy runs begin near 10 and grow threefold at
most. A first length below 1 counts as 1: a model that wakes up is no explosion."""
VANISHED = 100
"""Times AdamW's epsilon. It divides gradients by their own size plus epsilon, so small ones serve as well as large ones
until they come near it; a part of 10,000 weights has a gradient 100 times as long as that of one weight."""
LEARNT = 0.1
"""Share of the loss of guessing under which gradients are small because there is nothing left to learn."""
ONE_SIDED = 0.01
"""Share of the other tower's gradient. In healthy runs the towers differ twentyfold at most, for a moment."""


@check(
    "not-a-number",
    "alarm",
    "A number became NaN",
    "the run ended because its loss or gradient was not a number",
)
def not_a_number(summary: Summary, around: Surroundings) -> Found | None:
    error = str(summary.ending.get("error", ""))
    if NOT_A_NUMBER not in error:
        return None
    text = error.partition("\nTry: ")[0]
    last = [
        f"gradient {norm:.3g}"
        for norm in numbers(event.get("grad_norm") for event in summary.steps[-1:])
    ]
    before = "".join(
        f"; the step before had a {gradient}, {_longest(summary.steps[-1])}" for gradient in last
    )
    rate = number(summary.setting("train", "learning_rate")) or 0.0
    in_half = summary.setting("train", "dtype") == "float16" and rate <= TOO_WILD
    again = around.train("train.dtype=float32") if in_half else around.train_gentler(summary)
    return Found(f"{text.splitlines()[0]} Learning rate {rate:g}{before}", f"a new run: {again}")


@check(
    "exploding-gradients",
    "alarm",
    "Gradients explode",
    f"the latest are {EXPLODED} times as long as the first, or longer than {TOO_LONG:,}",
)
def exploding(summary: Summary, around: Surroundings) -> Found | None:
    first = _median_norm(summary.steps[:RECENT_STEPS])
    latest = _median_norm(recent(summary.steps))
    if len(summary.steps) < LEAST_STEPS or first is None or latest is None:
        return None
    if latest < EXPLODED * max(1.0, first) and latest < TOO_LONG:
        return None
    return Found(
        f"gradients {latest:.3g} long at step {summary.step:,}, {first:.3g} at first; {_longest(summary.steps[-1])}",
        f"see that the weights it began with are sound; then {around.train_gentler(summary)}",
    )


@check(
    "vanishing-gradients",
    "warning",
    "Gradients vanish",
    f"those of a part are below {VANISHED} times AdamW's epsilon while there is still something to learn",
)
def vanishing(summary: Summary, around: Surroundings) -> Found | None:
    parts = _part_norms(recent(summary.steps))
    losses = numbers(contrastive_loss(event) for event in recent(summary.steps))
    if not has_learnt_a_while(summary) or not summary.chance_loss or not parts or not losses:
        return None
    least = VANISHED * (number(summary.setting("train", "epsilon")) or 0.0)
    gone = {part: norm for part, norm in parts.items() if norm <= least}
    if not gone or statistics.median(losses) < LEARNT * summary.chance_loss:
        return None
    named = ", ".join(f"{part} {norm:.1e}" for part, norm in list(gone.items())[:4])
    more = f" and {len(gone) - 4} parts more" if len(gone) > 4 else ""
    return Found(
        f"{named}{more}, at a loss of {statistics.median(losses):.3g}; AdamW's epsilon damps what is near "
        f"{least / VANISHED:g}",
        f"a shallower model or a lower learning rate: {around.train_gentler(summary)}",
    )


@check(
    "one-tower",
    "warning",
    "One tower learns and the other does not",
    f"a tower has no gradients, or under {ONE_SIDED:.0%} of the other's",
)
def one_tower(summary: Summary, around: Surroundings) -> Found | None:
    parts = _part_norms(recent(summary.steps))
    if not has_learnt_a_while(summary) or not parts:
        return None
    lengths = {tower: _length(parts, tower) for tower in TOWERS}
    weak, strong = sorted(TOWERS, key=lengths.__getitem__)
    if lengths[weak] < ONE_SIDED * lengths[strong]:
        what = "images" if weak == "image" else "captions"
        return Found(
            f"gradient of the {weak} tower {lengths[weak]:.2g}, of the {strong} tower {lengths[strong]:.2g}",
            f"see that the {what} differ from each other and that the {weak} tower is not frozen; then "
            f"{around.train_gentler(summary)}",
        )
    return None


def _median_norm(steps: list[dict[str, Any]]) -> float | None:
    norms = numbers(event.get("grad_norm") for event in steps)
    return statistics.median(norms) if norms else None


def _part_norms(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The median gradient of each part of a tower; the temperature and the bias have one weight each."""
    found: dict[str, list[float]] = {}
    for event in steps:
        for part, norm in mapping(event.get("grad_norms")).items():
            if "." in part and number(norm) is not None:
                found.setdefault(part, []).append(norm)
    return {part: statistics.median(norms) for part, norms in found.items()}


def _longest(step: dict[str, Any]) -> str:
    parts = _part_norms([step])
    return f"the longest in {max(parts, key=parts.__getitem__)}" if parts else "by part unknown"


def _length(parts: dict[str, float], tower: str) -> float:
    return math.hypot(*(norm for part, norm in parts.items() if part.startswith(f"{tower}.")))


CHECKS = (not_a_number, exploding, vanishing, one_tower)

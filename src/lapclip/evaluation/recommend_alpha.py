"""Which alpha to take between the start and the end of a fine-tuning, and what to say about it. No torch, no numpy.

The rule: of the alphas above 0 that lose at most a tenth of what the start had on every check that decides, the one
with the best metric on the new data, among equals the smallest. Where none loses so little, the one that loses least.
Where the start has a better metric on the new data than that one, the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_LOST = 0.1
"""Share of the start's score that a check may lose."""


class Recommendation(NamedTuple):
    alpha: float
    why: str


def recommend(new: dict[str, Any], checks: Sequence[dict[str, Any]]) -> Recommendation:
    """The alpha to take, from the curves of the new data and of the checks."""
    start, *others = new["curve"]
    deciding = [check for check in checks if check["decides"]]
    lost = {point["alpha"]: max([lost_share(check, at) for check in deciding], default=0.0)
            for at, point in enumerate(others, 1)}  # fmt: skip
    close = [point for point in others if lost[point["alpha"]] <= MOST_LOST]
    if close:
        best = max(close, key=lambda point: point["value"])
        why = "the best on the new data of those that lose at most 10 % on every check"
        if not deciding:
            why = "the best on the new data; no check decides, because the start was not clearly above chance on any"
            why = why if checks else "the best on the new data; there is no check"
    else:
        best = min(others, key=lambda point: lost[point["alpha"]])
        why = f"every alpha loses more than 10 % on some check; this one loses least, {lost[best['alpha']]:.0%}"
    if best["value"] < start["value"]:
        return Recommendation(start["alpha"], "the start itself is better on the new data than what could be kept")
    return Recommendation(best["alpha"], why)


def lost_share(check: dict[str, Any], at: int) -> float:
    """How much of the start's score a check has lost at one of its points; below 0 where it gained."""
    before, after = check["curve"][0]["value"], check["curve"][at]["value"]
    return (before - after) / before if before else 0.0


def point_at(found: dict[str, Any], alpha: float) -> dict[str, Any]:
    """The point of a curve at an alpha."""
    return next(point for point in found["curve"] if point["alpha"] == alpha)


def summary(new: dict[str, Any], checks: Sequence[dict[str, Any]], alpha: float) -> str:
    """One sentence, or two, for a person."""
    deciding = [check for check in checks if check["decides"]]
    end = new["curve"][-1]["alpha"]
    parts = [_change(new, end), *(_change(check, end) for check in deciding)]
    text = f"Fine-tuning {_joined(parts)}."
    if alpha == end:
        return f"{text} Its end is also what is recommended."
    if alpha == new["curve"][0]["alpha"]:
        return f"{text} Recommended is the start, as it was."
    parts = [_change(new, alpha), *(_change(check, alpha) for check in deciding)]
    return f"{text} At alpha {alpha:g}, which is recommended, it {_joined(parts)}."


def _change(found: dict[str, Any], alpha: float) -> str:
    """What happened to one metric: in points, beside what it was."""
    before, point = found["curve"][0], point_at(found, alpha)
    change, (low, high) = point["change"], point["change_interval"]
    noise = "" if low > 0 or high < 0 else ", which may be noise" if change else ""
    points = f"{abs(change) * 100:.1f}"
    from_to = f"{before['value']:.1%} to {point['value']:.1%}{noise}"
    if points == "0.0":
        return f"kept {before['value']:.1%} on {found['name']}"
    return f"{'gained' if change > 0 else 'lost'} {points} points on {found['name']} ({from_to})"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]

"""Curves out of events: read, smoothed, and thinned to what a screen can show."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lapclip.text import number

POINTS = 1500
"""More points than this a screen cannot show."""
WINDOWS = 100


@dataclass(frozen=True)
class Curve:
    """Points in order of x."""

    x: list[float]
    y: list[float]

    def __bool__(self) -> bool:
        return bool(self.x)

    def __len__(self) -> int:
        return len(self.x)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values. None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def curve(
    events: Iterable[dict[str, Any]], read: Callable[[dict[str, Any]], Any], x: str = "step"
) -> Curve:
    """One figure over the events that have it."""
    points = [
        (at, value)
        for event in events
        if (at := number(event.get(x))) is not None and (value := number(read(event))) is not None
    ]
    return Curve([point[0] for point in points], [point[1] for point in points])


def smoothed(points: Curve, share: float = 0.03) -> Curve:
    """Means of the points around each one, over `share` of the curve: unlike a running mean it does not lag."""
    half = max(1, round(len(points) * share / 2))
    sums = [0.0, *itertools.accumulate(points.y)]
    values = []
    for at in range(len(points)):
        first, end = max(0, at - half), min(len(points), at + half + 1)
        values.append((sums[end] - sums[first]) / (end - first))
    return Curve(points.x, values)


def thinned(points: Curve, most: int = POINTS) -> Curve:
    """At most about `most` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    kept = set()
    for first in range(0, len(points), size):
        stretch = range(first, min(first + size, len(points)))
        kept |= {min(stretch, key=points.y.__getitem__), max(stretch, key=points.y.__getitem__)}
    chosen = sorted({0, *kept, len(points) - 1})
    return Curve([points.x[at] for at in chosen], [points.y[at] for at in chosen])


def windows(points: Curve, most: int = WINDOWS, least: int = 1) -> Curve:
    """Medians of equal stretches of at least `least` points, each at its last x."""
    size = max(least, math.ceil(len(points) / most))
    firsts = range(0, len(points), size)
    return Curve(
        [points.x[min(first + size, len(points)) - 1] for first in firsts],
        [statistics.median(points.y[first : first + size]) for first in firsts],
    )


def samples(count: int, most: int = 8) -> list[int]:
    """Positions spread evenly over `count` points, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(at * (count - 1) / (most - 1)) for at in range(most)]

"""Small drawings made of characters: curves in braille, bars in blocks, and both in plain letters where need be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lapclip.runs.curves import Curve

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dot of each row and column of a braille character."""
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-=+*#"


def curve(points: Curve, width: int, height: int = 1, plain: bool = False) -> list[str]:
    """A curve over the whole width, as `height` lines of text; empty lines where there are no points."""
    if not points or width < 1:
        return [" " * max(0, width)] * height
    if plain:
        values = evenly(points, width)
        low, high = min(values), max(values)
        row = "".join(level((value - low) / (high - low) if high > low else 0.5, plain=True) for value in values)
        return [row] + [" " * width] * (height - 1)
    values = evenly(points, 2 * width)
    low, high, top = min(values), max(values), 4 * height - 1
    # A level curve runs through the middle; a bottom line would look like zero.
    rows = [top - (round((value - low) / (high - low) * top) if high > low else top // 2) for value in values]
    cells = [[0] * width for _ in range(height)]
    for at, row in enumerate(rows):
        before = rows[at - 1] if at else row
        # A steep stretch is drawn as an upright line, half of it in each column, so that the curve does not break.
        for dot in range(min(row, _halfway(before, row)), max(row, _halfway(before, row)) + 1):
            cells[dot // 4][at // 2] |= _DOTS[dot % 4][at % 2]
        if at and abs(before - row) > 1:
            half = _halfway(before, row)
            for dot in range(min(before, half), max(before, half) + 1):
                cells[dot // 4][(at - 1) // 2] |= _DOTS[dot % 4][(at - 1) % 2]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def evenly(points: Curve, count: int) -> list[float]:
    """`count` values at even distances of x: means where points are dense, on the line between them where they are not.

    Of a long run steps are known at uneven distances, so places go by x and not by order.
    """
    first, reach = points.x[0], points.x[-1] - points.x[0]
    if reach <= 0:
        return [points.y[-1]] * count
    found: list[list[float]] = [[] for _ in range(count)]
    for x, y in zip(points.x, points.y, strict=True):
        found[min(count - 1, int((x - first) / reach * count))].append(y)
    means = {at: math.fsum(values) / len(values) for at, values in enumerate(found) if values}
    for before, after in itertools.pairwise(sorted(means)):
        for at in range(before + 1, after):
            means[at] = means[before] + (means[after] - means[before]) * (at - before) / (after - before)
    return [means[at] for at in range(count)]


def level(part: float, plain: bool = False) -> str:
    """One character that is as full as `part` of 1."""
    levels = _PLAIN_LEVELS if plain else _LEVELS
    return levels[min(len(levels) - 1, max(0, int(part * len(levels))))]


def bar(part: float, width: int, plain: bool = False) -> tuple[str, str]:
    """A progress bar, done and to do."""
    part = min(1.0, max(0.0, part))
    if plain:
        done = int(part * width)
        return "#" * done, "-" * (width - done)
    halves = int(part * width * 2)
    done = "━" * (halves // 2) + ("╸" if halves % 2 else "")
    return done, "─" * (width - len(done))


def split(parts: Sequence[float], width: int) -> list[int]:
    """Whole characters for each part of a bar: together the width, none that is there left out."""
    total = math.fsum(parts)
    if not total or width < 1:
        return [0] * len(parts)
    counts = [max(1, int(part / total * width)) if part else 0 for part in parts]
    while sum(counts) != width:
        change = 1 if sum(counts) < width else -1
        # Give to the part that is most too short, take from the one most too long.
        wrong = [part / total * width - count for part, count in zip(parts, counts, strict=True)]
        may = [at for at, count in enumerate(counts) if count + change >= 1 and parts[at]]
        if not may:
            break
        counts[max(may, key=lambda at: wrong[at] * change)] += change
    return counts


def _halfway(first: int, second: int) -> int:
    return (first + second) // 2 if abs(first - second) > 1 else second

"""How sure a metric is: 95 % intervals by drawing the images again (the bootstrap, by its percentiles).

Where all answers are right, or all wrong, drawing them again says nothing; there it is Wilson's end over the images.
Images are what is drawn, with all their captions: captions of one image are not independent of each other.
Shapes: N images, K metrics, r draws held at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lapclip.seeding import generator

REPEATS, LEAST_REPEATS = 1000, 200
DRAWS = 200_000_000
"""Images drawn in all at most: beyond 200,000 images there are fewer repeats, where intervals are narrow anyway."""
CELLS = 2_000_000
"""Weights held at once."""


def resamples(count: int) -> Iterator[np.ndarray]:
    """How often each of `count` images is drawn, a row a repeat, in blocks of rows."""
    draw = generator(0, "bootstrap")
    repeats = min(REPEATS, max(LEAST_REPEATS, DRAWS // count))
    at_once = max(1, CELLS // count)
    for first in range(0, repeats, at_once):
        size = min(at_once, repeats - first)
        cells = draw.integers(count, size=(size, count)) + np.arange(size)[:, None] * count
        yield (
            np.bincount(cells.ravel(), minlength=size * count)
            .reshape(size, count)
            .astype(np.float64)
        )


def mean_intervals(hits_KN: np.ndarray, counts_KN: np.ndarray) -> list[list[float]]:
    """Return the intervals of shares, sum(hits) / sum(counts). All see the same draws."""
    drawn = []
    for weights_rN in resamples(hits_KN.shape[1]):
        drawn.append((weights_rN @ hits_KN.T) / np.maximum(weights_rN @ counts_KN.T, 1e-12))
    intervals = []
    for values, hits_N, counts_N in zip(np.concatenate(drawn).T, hits_KN, counts_KN, strict=True):
        share = float(hits_N.sum() / max(counts_N.sum(), 1e-12))
        intervals.append(share_interval(values, share, int((counts_N > 0).sum())))
    return intervals


def bootstrap_interval(hits_N: np.ndarray, counts_N: np.ndarray) -> list[float]:
    """Return the interval of one share, sum(hits) / sum(counts)."""
    return mean_intervals(np.asarray(hits_N)[None], np.asarray(counts_N)[None])[0]


def percentiles(values: np.ndarray | list[float]) -> list[float]:
    """The middle 95 %."""
    return [float(value) for value in np.quantile(values, [0.025, 0.975])]


def share_interval(drawn: np.ndarray, share: float, images: int) -> list[float]:
    """Of a share with its values in each draw: never certain, even where all answers are the same."""
    if share in (0.0, 1.0):
        return wilson_interval(share * images, images)
    return percentiles(drawn)


def wilson_interval(hits: float, count: int) -> list[float]:
    """Of a share of `count` independent answers: E. B. Wilson, 1927. Sound for few, where the bootstrap is not."""
    if count == 0:
        return [0.0, 1.0]
    z, share = 1.959964, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    )
    return [middle - half if hits else 0.0, middle + half if hits < count else 1.0]

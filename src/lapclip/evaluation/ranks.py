"""The rank of the right answer, among all candidates, without a matrix of all similarities.

Products are exact, so that a rank never depends on how the work is cut into blocks, and equal embeddings tie: rows are
rounded to multiples of 2**-26 (finer than float32 products are) and multiplied in float64. Each product is then a
multiple of 2**-52, and no sum of them exceeds the rows' lengths, so nothing is ever rounded away, in whatever order.

Shapes: N images, M captions, E embedding; b and c rows of a block.
"""

from __future__ import annotations

import numpy as np

BLOCK = 1024
"""Similarities held at once are at most this many squared."""
GRID = 2.0**26


def ranks(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks from 1: of each caption's own image among all images, and of each image's best caption among all.

    Other captions of the same image do not count as wrong. A tie counts against the model, and so does what is not a
    number: a model that gives every pair the same score finds nothing. An image without captions comes last.
    """
    image_scale, text_scale = grid_scale(image_NE), grid_scale(text_ME)
    own_M = np.concatenate([
        (exact(text_ME[at], text_scale) * exact(image_NE[image_M[at]], image_scale)).sum(axis=1)
        for at in blocks(len(text_ME))
    ])  # fmt: skip
    best_N = np.full(len(image_NE), -np.inf)
    with np.errstate(invalid="ignore"):  # what is not a number stays so, and is found last
        np.maximum.at(best_N, image_M, own_M)
    t2i_M, i2t_N = np.zeros(len(text_ME), dtype=np.int64), np.zeros(len(image_NE), dtype=np.int64)
    for captions in blocks(len(text_ME)):
        text_bE = exact(text_ME[captions], text_scale)
        for images in blocks(len(image_NE)):
            scores_bc = text_bE @ exact(image_NE[images], image_scale).T
            # "Not less" instead of "at least": true of what is not a number.
            t2i_M[captions] += (~(scores_bc < own_M[captions, None])).sum(axis=1)
            i2t_N[images] += (~(scores_bc < best_N[None, images])).sum(axis=0)
    # A caption met its own image once. An image met those of its own captions that tie for its best.
    own_ties_N = np.bincount(image_M, weights=~(own_M < best_N[image_M]), minlength=len(image_NE))
    return t2i_M, i2t_N - own_ties_N.astype(np.int64) + 1


def best_images(
    image_NE: np.ndarray, text_ME: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """The images that score best for each caption, the best first, and their scores."""
    most = min(most, len(image_NE))
    found, scores = (
        np.zeros((len(text_ME), 0), dtype=np.int64),
        np.zeros((len(text_ME), 0), dtype=np.float32),
    )
    for images in blocks(len(image_NE)):
        found_blocks, score_blocks = [], []
        for captions in blocks(len(text_ME)):
            fresh_bc = text_ME[captions] @ image_NE[images].T
            index_bc = np.broadcast_to(np.arange(images.start, images.stop), fresh_bc.shape)
            all_scores = np.concatenate([scores[captions], fresh_bc], axis=1)
            all_found = np.concatenate([found[captions], index_bc], axis=1)
            order = np.argsort(-all_scores, axis=1, kind="stable")[:, :most]
            found_blocks.append(np.take_along_axis(all_found, order, axis=1))
            score_blocks.append(np.take_along_axis(all_scores, order, axis=1))
        found, scores = np.concatenate(found_blocks), np.concatenate(score_blocks)
    return found, scores


def blocks(count: int) -> list[slice]:
    """`count` rows in blocks."""
    return [slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK)]


def grid_scale(rows_NE: np.ndarray) -> float:
    """The power of two that brings rows to lengths of at most 1.4; 1 for rows of unit length."""
    longest = max(
        float((rows_NE[at].astype(np.float64) ** 2).sum(axis=1).max())
        for at in blocks(len(rows_NE))
    )
    return (
        float(2.0 ** np.ceil(np.log2(longest**0.5 / 1.4)))
        if np.isfinite(longest) and longest > 0
        else 1.0
    )


def exact(rows_bE: np.ndarray, scale: float) -> np.ndarray:
    """Rows whose products have no rounding."""
    return np.round(rows_bE.astype(np.float64) * (GRID / scale)) / GRID


def survival(candidates: int, own: int) -> np.ndarray:
    """By luck alone: the probability that none of `own` right answers is among the first k, for k = 0 to all."""
    left = np.arange(candidates, 0, -1, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod(np.maximum(left - own, 0) / left)])


def chance_metrics(candidates: int, own_N: np.ndarray, ranks: tuple[int, ...]) -> dict[str, float]:
    """What shuffled candidates give: recall at each of `ranks`, and the mean reciprocal rank.

    own_N is how many right answers each question has. With one of N that is K / N; with five captions of an image
    among M it is more than K / M and less than 5 K / M, because the first of them is what counts.
    """
    kinds, counts = np.unique(own_N, return_counts=True)
    missed = sum(
        count * survival(candidates, int(own)) for own, count in zip(kinds, counts, strict=True)
    ) / len(own_N)
    missed = np.asarray(missed)
    first = missed[:-1] - missed[1:]
    found = {f"r{rank}": float(1 - missed[min(rank, candidates)]) for rank in ranks}
    found["mean_reciprocal_rank"] = float((first / np.arange(1, candidates + 1)).sum())
    return found

"""Recall at K both ways, with every true caption counted, and how sure the figures are.

Shapes: N pictures, M captions, E embedding, R ranks asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lapclip.randomness import generator

RANKS = (1, 5, 10)
BLOCK = 1024
"""Rows of similarities held at once, so that large sets need no full matrix."""


def retrieval(image_NE: np.ndarray, text_ME: np.ndarray, picture_M: np.ndarray) -> dict[str, Any]:
    """Recall of pictures by captions (t2i) and of captions by pictures (i2t). picture_M is each caption's picture.

    A tie counts against the model: one that gives every pair the same score finds nothing.
    """
    t2i_M = caption_ranks(image_NE, text_ME, picture_M)
    i2t_N = picture_ranks(image_NE, text_ME, picture_M)
    # Captions of one picture are not independent, so pictures are what is drawn again for the intervals.
    captions_N = np.bincount(picture_M, minlength=len(image_NE))
    scores: dict[str, Any] = {"candidates": len(image_NE), "captions": len(text_ME)}
    intervals = {}
    for rank in RANKS:
        hits_N = np.bincount(picture_M, weights=t2i_M < rank, minlength=len(image_NE))
        scores[f"t2i_r{rank}"] = float(hits_N.sum() / captions_N.sum())
        intervals[f"t2i_r{rank}"] = bootstrap_interval(hits_N, captions_N)
    for rank in RANKS:
        scores[f"i2t_r{rank}"] = float(np.mean(i2t_N < rank))
        intervals[f"i2t_r{rank}"] = bootstrap_interval((i2t_N < rank).astype(float), np.ones(len(i2t_N)))
    similar = similarities(image_NE, text_ME, picture_M)
    return {**scores, "chance": 1 / len(image_NE), "intervals": intervals, "similarities": similar}


def similarities(image_NE: np.ndarray, text_ME: np.ndarray, picture_M: np.ndarray) -> dict[str, float]:
    """How alike embeddings are: true pairs, any picture and caption with their spread, any two pictures or captions.

    From sums over pictures and captions alone, so that large sets need no matrix of all similarities.
    """
    image_NE, text_ME = image_NE.astype(np.float64), text_ME.astype(np.float64)
    mean = float(image_NE.mean(axis=0) @ text_ME.mean(axis=0))
    square = float(((image_NE.T @ image_NE) * (text_ME.T @ text_ME)).sum()) / (len(image_NE) * len(text_ME))
    return {
        "own": float(np.einsum("me,me->m", image_NE[picture_M], text_ME).mean()),
        "mean": mean,
        "spread": max(0.0, square - mean**2) ** 0.5,
        "pictures": _mean_of_two(image_NE),
        "captions": _mean_of_two(text_ME),
    }


def _mean_of_two(rows_NE: np.ndarray) -> float:
    """The mean similarity of two different rows of unit length."""
    count, total_E = len(rows_NE), rows_NE.sum(axis=0)
    return float(total_E @ total_E - count) / max(1, count * (count - 1))


def caption_ranks(image_NE: np.ndarray, text_ME: np.ndarray, picture_M: np.ndarray) -> np.ndarray:
    """For each caption, how many wrong pictures score at least as well as its own."""
    ranks = []
    for first in range(0, len(text_ME), BLOCK):
        scores_bN = text_ME[first : first + BLOCK] @ image_NE.T
        own_b1 = np.take_along_axis(scores_bN, picture_M[first : first + BLOCK, None], axis=1)
        ranks.append((scores_bN >= own_b1).sum(axis=1) - 1)
    return np.concatenate(ranks)


def picture_ranks(image_NE: np.ndarray, text_ME: np.ndarray, picture_M: np.ndarray) -> np.ndarray:
    """For each picture, how many captions of other pictures score at least as well as its best own one."""
    ranks = []
    for first in range(0, len(image_NE), BLOCK):
        scores_bM = image_NE[first : first + BLOCK] @ text_ME.T
        own_bM = picture_M[None, :] == np.arange(first, first + len(scores_bM))[:, None]
        best_b1 = np.where(own_bM, scores_bM, -np.inf).max(axis=1, keepdims=True)
        ranks.append(((scores_bM >= best_b1) & ~own_bM).sum(axis=1))
    return np.concatenate(ranks)


def batch_accuracy(image_NE: np.ndarray, text_NE: np.ndarray, size: int, repeats: int = 100) -> dict[str, Any]:
    """Accuracy within random batches of `size` pairs, both ways averaged: what published training logs call accuracy.

    Averaged over `repeats` random partitions of the pairs; pairs left over by a partition sit it out.
    """
    count = len(image_NE) // size * size
    draw = generator(0, "partitions")
    hits_N, shows_N = np.zeros(len(image_NE)), np.zeros(len(image_NE))
    for _ in range(repeats):
        rows_Gs = draw.permutation(len(image_NE))[:count].reshape(-1, size)
        scores_Gss = np.einsum("gie,gje->gij", text_NE[rows_Gs], image_NE[rows_Gs], optimize=True)
        own_Gs = np.einsum("gii->gi", scores_Gss)
        t2i_Gs = (scores_Gss >= own_Gs[:, :, None]).sum(axis=2) == 1
        i2t_Gs = (scores_Gss >= own_Gs[:, None, :]).sum(axis=1) == 1
        hits_N[rows_Gs] += (t2i_Gs + i2t_Gs.astype(float)) / 2
        shows_N[rows_Gs] += 1
    return {
        "size": size,
        "accuracy": float(hits_N.sum() / shows_N.sum()),
        "interval": bootstrap_interval(hits_N, shows_N),
        "chance": 1 / size,
    }


def bootstrap_interval(hits_N: np.ndarray, counts_N: np.ndarray, repeats: int = 1000) -> list[float]:
    """95 % interval of sum(hits) / sum(counts) over resampled pictures."""
    rows = generator(0, "bootstrap").integers(len(hits_N), size=(repeats, len(hits_N)))
    means = hits_N[rows].sum(axis=1) / np.maximum(counts_N[rows].sum(axis=1), 1)
    return [float(value) for value in np.quantile(means, [0.025, 0.975])]

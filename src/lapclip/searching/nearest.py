"""Exact search: every vector is compared with the question, and the highest scores come in the same order each time.

The vectors are multiplied as they lie, in float16: a third of the time and no copy, but rounded. So that gives a short
list which is sure to hold the best, because the rounding has a bound, and the list is computed again in float32.

Shapes: N images, E embedding.
"""

from __future__ import annotations

import numpy as np
import torch

BOUND = 1.1e-3
"""How far a float16 score can be from the true one: half a unit in the last of 11 bits for the score, and as much again
for the question, both of length at most one; what is added up is float32."""
BLOCK = 16384
"""Vectors of a short list that are computed again at a time."""


def nearest(
    vectors: np.ndarray, rows_N: np.ndarray, numbers_N: np.ndarray, question_E: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places among N of the images nearest to a question, and their scores: the highest first, and of equal ones the
    lower number. `rows_N` says which of the vectors is whose, in rising order."""
    question_E = np.ascontiguousarray(question_E, dtype=np.float32)
    count = min(count, len(rows_N))
    if count <= 0:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    places, rough_N = np.arange(len(rows_N)), None
    if count < len(rows_N):
        rough_N = rough_scores(vectors, question_E)
        if len(rows_N) < len(vectors):  # rows are distinct and in order, so that as many as there are is all of them
            rough_N = rough_N[rows_N]
        last = np.partition(rough_N, len(rough_N) - count)[len(rough_N) - count]
        places = np.flatnonzero(rough_N >= last - 2 * BOUND)
    scores = exact_scores(vectors, rows_N[places], question_E)
    if rough_N is not None and np.abs(rough_N[places] - scores).max() > BOUND:
        # Some processor adds up in float16 after all, so the list is not sure to hold the best.
        places = np.arange(len(rows_N))
        scores = exact_scores(vectors, rows_N, question_E)
    order = np.lexsort((numbers_N[places], -scores))[:count]
    return places[order], scores[order]


@torch.inference_mode()
def rough_scores(vectors_NE: np.ndarray, question_E: np.ndarray) -> np.ndarray:
    """The product of a question with each vector, to within `BOUND`."""
    return torch.mv(torch.from_numpy(vectors_NE), torch.from_numpy(question_E).half()).float().numpy()


def exact_scores(vectors: np.ndarray, rows_N: np.ndarray, question_E: np.ndarray) -> np.ndarray:
    """The product of a question with some of the vectors, in float32. Row by row, so that equal vectors score equal."""
    parts = [
        (vectors[rows_N[at : at + BLOCK]].astype(np.float32) * question_E).sum(axis=1)
        for at in range(0, len(rows_N), BLOCK)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)

"""Exact search: the product of a question with every vector, and the highest of them, always in the same order.

Shapes: N vectors, E embedding.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

# Mapped memory cannot be written to, and nobody does.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

BLOCK = 16384
"""Vectors at a time: 32 MB in float32 at 512 numbers each."""


@torch.inference_mode()
def similarities(vectors_NE: np.ndarray, question_E: np.ndarray) -> np.ndarray:
    """The product of a question with each vector, in float32."""
    scores = torch.empty(len(vectors_NE), dtype=torch.float32)
    question = torch.from_numpy(np.ascontiguousarray(question_E, dtype=np.float32))
    block = torch.empty(min(BLOCK, len(vectors_NE)), vectors_NE.shape[1], dtype=torch.float32)
    for at in range(0, len(vectors_NE), BLOCK):
        part = torch.from_numpy(vectors_NE[at : at + BLOCK])
        wide = block[: len(part)].copy_(part)
        torch.mv(wide, question, out=scores[at : at + len(part)])
    return scores.numpy()


def highest(scores_N: np.ndarray, numbers_N: np.ndarray, count: int) -> np.ndarray:
    """Places of the highest scores, the highest first; of equal ones that with the lower number first."""
    count = min(count, len(scores_N))
    if count <= 0:
        return np.zeros(0, np.int64)
    if count < len(scores_N):
        # All that tie with the last one compete for its place.
        least = np.partition(scores_N, len(scores_N) - count)[len(scores_N) - count]
        places = np.flatnonzero(scores_N >= least)
    else:
        places = np.arange(len(scores_N))
    order = np.lexsort((numbers_N[places], -scores_N[places]))
    return places[order[:count]]

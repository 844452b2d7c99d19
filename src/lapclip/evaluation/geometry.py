"""How alike the embeddings of images and captions are.

Shapes: N images, M captions, E embedding; rows are of unit length.
"""

from __future__ import annotations

import numpy as np

from lapclip.evaluation.ranks import blocks


def similarities(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray
) -> dict[str, float]:
    """How alike embeddings are: true pairs, any image and caption with their spread, any two images or captions.

    From sums over images and captions alone, so that large sets need no matrix of all similarities.
    """
    image_E, text_E = (rows.sum(axis=0, dtype=np.float64) for rows in (image_NE, text_ME))
    mean = float(image_E @ text_E) / (len(image_NE) * len(text_ME))
    square = float((_products(image_NE) * _products(text_ME)).sum()) / (
        len(image_NE) * len(text_ME)
    )
    return {
        "own": float(_of_pairs(image_NE, text_ME, image_M).mean()),
        "mean": mean,
        "spread": max(0.0, square - mean**2) ** 0.5,
        "pictures": _mean_of_two(image_E, len(image_NE)),
        "captions": _mean_of_two(text_E, len(text_ME)),
    }


def _of_pairs(image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray) -> np.ndarray:
    """The similarity of each caption and one image."""
    return np.concatenate([
        np.einsum("me,me->m", image_NE[image_M[at]].astype(np.float64), text_ME[at]) for at in blocks(len(text_ME))
    ])  # fmt: skip


def _products(rows_NE: np.ndarray) -> np.ndarray:
    """Sums over rows of the products of any two of their numbers."""
    total_EE = np.zeros((rows_NE.shape[1], rows_NE.shape[1]))
    for at in blocks(len(rows_NE)):
        block_bE = rows_NE[at].astype(np.float64)
        total_EE += block_bE.T @ block_bE
    return total_EE


def _mean_of_two(total_E: np.ndarray, count: int) -> float:
    """The mean similarity of two different rows of unit length, from the sum of all."""
    return float(total_E @ total_E - count) / max(1, count * (count - 1))

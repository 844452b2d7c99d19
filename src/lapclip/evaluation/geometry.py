"""How embeddings lie in their space: similarities, the gap between images and captions, alignment, uniformity.

Shapes: N images, M captions, P true pairs, E embedding; rows are of unit length.
"""

from __future__ import annotations

import numpy as np

from lapclip.evaluation.ranks import blocks
from lapclip.seeding import generator

MOST_ROWS = 10_000
"""Rows that uniformity compares with each other; of more, so many are drawn."""
BINS = 40


def geometry(
    image_NE: np.ndarray, text_ME: np.ndarray, image_P: np.ndarray, text_P: np.ndarray | None = None
) -> dict[str, float]:
    """The modality gap (Liang et al. 2022), alignment and uniformity (Wang and Isola 2020).

    image_P and text_P are the rows of each true pair; without text_P there is one for each caption. The gap is the
    distance of the pairs' two centroids. Alignment is the mean squared distance of a caption and its image: 0 at
    best. Uniformity is ln of the mean of exp(-2 distance**2) over pairs of images or of captions: 0 where all are one
    point, near -4 where they are spread evenly over a sphere of many dimensions.
    """
    text_P = np.arange(len(text_ME)) if text_P is None else text_P
    shares_M = np.bincount(text_P, minlength=len(text_ME)) / len(text_P)
    centre_E = sum(shares_M[at] @ text_ME[at].astype(np.float64) for at in blocks(len(text_ME)))
    aligned = sum(
        float(((image_NE[image_P[at]].astype(np.float64) - text_ME[text_P[at]]) ** 2).sum())
        for at in blocks(len(text_P))
    )
    return {
        "modality_gap": float(np.linalg.norm(image_NE.mean(axis=0, dtype=np.float64) - centre_E)),
        "alignment": aligned / len(text_P),
        "uniformity_pictures": uniformity(image_NE),
        "uniformity_captions": uniformity(text_ME),
        "uniformity_rows": min(MOST_ROWS, max(len(image_NE), len(text_ME))),
    }


def uniformity(rows_NE: np.ndarray) -> float:
    """ln of the mean of exp(-2 distance**2) over pairs of different rows; of more than MOST_ROWS, so many drawn."""
    if len(rows_NE) > MOST_ROWS:
        rows_NE = rows_NE[generator(0, "uniformity").choice(len(rows_NE), MOST_ROWS, replace=False)]
    count = len(rows_NE)
    if count < 2:
        return 0.0
    total = 0.0
    for first in blocks(count):
        for second in blocks(count):
            # For unit rows the squared distance is 2 - 2 similarity.
            near_bc = np.exp(4 * (rows_NE[first] @ rows_NE[second].T).astype(np.float64) - 4)
            total += float(near_bc.sum() - (np.trace(near_bc) if first == second else 0.0))
    return float(np.log(max(total / (count * (count - 1)), np.finfo(float).tiny)))


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


def similarity_histograms(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray
) -> dict[str, list[float]]:
    """Shares of true pairs and of other pairs by their similarity. Each caption meets one other image, drawn."""
    other_M = (
        image_M + generator(0, "other images").integers(1, max(2, len(image_NE)), len(image_M))
    ) % len(image_NE)
    own, other = (_of_pairs(image_NE, text_ME, rows) for rows in (image_M, other_M))
    low, high = float(min(own.min(), other.min())), float(max(own.max(), other.max()))
    edges = np.linspace(low, max(high, low + 1e-3), BINS + 1)
    shares = {
        name: np.histogram(values, edges)[0] / len(values)
        for name, values in (("own", own), ("other", other))
    }
    return {"edges": edges.tolist(), **{name: values.tolist() for name, values in shares.items()}}


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

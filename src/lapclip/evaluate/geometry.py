"""How embeddings lie in their space: similarities, the gap between pictures and captions, alignment, uniformity.

Shapes: N pictures, M captions, E embedding; rows are of unit length.
"""

from __future__ import annotations

import numpy as np

from lapclip.evaluate.ranks import blocks
from lapclip.randomness import generator

MOST_ROWS = 10_000
"""Rows that uniformity compares with each other; of more, so many are drawn."""
BINS = 40


def geometry(image_NE: np.ndarray, text_ME: np.ndarray, picture_M: np.ndarray) -> dict[str, float]:
    """The modality gap (Liang et al. 2022), alignment and uniformity (Wang and Isola 2020).

    The gap is the distance of the two centroids. Alignment is the mean squared distance of a caption and its picture: 0
    at best. Uniformity is ln of the mean of exp(-2 distance**2) over pairs of pictures or of captions: 0 where all are
    one point, near -4 where they are spread evenly over a sphere of many dimensions.
    """
    apart_E = image_NE.astype(np.float64).mean(axis=0) - text_ME.astype(np.float64).mean(axis=0)
    aligned = sum(
        float(((image_NE[picture_M[at]].astype(np.float64) - text_ME[at]) ** 2).sum()) for at in blocks(len(text_ME))
    )
    return {
        "modality_gap": float(np.linalg.norm(apart_E)),
        "alignment": aligned / len(text_ME),
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


def similarity_histograms(image_NE: np.ndarray, text_ME: np.ndarray, picture_M: np.ndarray) -> dict[str, list[float]]:
    """Shares of true pairs and of other pairs by their similarity. Each caption meets one other picture, drawn."""
    other_M = (picture_M + generator(0, "other pictures").integers(1, max(2, len(image_NE)), len(picture_M))) % len(
        image_NE
    )
    own, other = (np.einsum("me,me->m", image_NE[rows], text_ME) for rows in (picture_M, other_M))
    low, high = float(min(own.min(), other.min())), float(max(own.max(), other.max()))
    edges = np.linspace(low, max(high, low + 1e-3), BINS + 1)
    shares = {name: np.histogram(values, edges)[0] / len(values) for name, values in (("own", own), ("other", other))}
    return {"edges": edges.tolist(), **{name: values.tolist() for name, values in shares.items()}}


def _mean_of_two(rows_NE: np.ndarray) -> float:
    """The mean similarity of two different rows of unit length."""
    count, total_E = len(rows_NE), rows_NE.sum(axis=0)
    return float(total_E @ total_E - count) / max(1, count * (count - 1))

"""Finding images by captions and captions by images: recall, mean reciprocal rank, and how sure.

Shapes: N images, M captions, E embedding, Q questions of one way, G batches of s of P pairs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.data.dataset import Pairs
from lapclip.evaluation import RANKS
from lapclip.evaluation.geometry import similarities
from lapclip.evaluation.intervals import bootstrap_interval, mean_intervals
from lapclip.evaluation.ranks import BLOCK, chance_metrics, ranks
from lapclip.evaluation.recall_estimate import estimate_recall
from lapclip.seeding import generator


def retrieval(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray, *, among_1000: bool = False
) -> dict[str, Any]:
    """Scores of images by captions (t2i) and of captions by images (i2t). image_M is each caption's image.

    A rank is counted from 1. For an image it is that of the best of its own captions. A tie counts against the model:
    one that gives every pair the same score finds nothing.
    """
    scores = retrieval_of(*ranks(image_NE, text_ME, image_M), image_M, among_1000=among_1000)
    return scores | {"similarities": similarities(image_NE, text_ME, image_M)}


@dataclass(frozen=True)
class Metric:
    """A mean over questions, with its sums over the questions of each image, so that images can be drawn again."""

    value: float
    chance: float
    hits_N: np.ndarray
    counts_N: np.ndarray
    """Questions of each image."""


def metrics_of(t2i_M: np.ndarray, i2t_N: np.ndarray, image_M: np.ndarray) -> dict[str, Metric]:
    """Return recall and mean reciprocal rank both ways, by name, as "t2i_r1"."""
    captions_N = np.bincount(image_M, minlength=len(i2t_N))
    asked = np.flatnonzero(captions_N)  # an image without a caption is a candidate, not a question
    t2i_chances = chance_metrics(len(i2t_N), np.ones(1), RANKS)
    i2t_chances = chance_metrics(len(t2i_M), captions_N[asked], RANKS)
    ways = {"t2i": (t2i_M, image_M, t2i_chances), "i2t": (i2t_N[asked], asked, i2t_chances)}
    metrics = {}
    for way, (rank_Q, owner_Q, chances) in ways.items():
        answers = {f"r{rank}": (rank_Q <= rank).astype(float) for rank in RANKS}
        answers["mean_reciprocal_rank"] = 1 / rank_Q
        counts_N = np.bincount(owner_Q, minlength=len(i2t_N)).astype(float)
        for name, answer_Q in answers.items():
            hits_N = np.bincount(owner_Q, weights=answer_Q, minlength=len(i2t_N))
            value = float(answer_Q.mean())
            metrics[f"{way}_{name}"] = Metric(value, chances[name], hits_N, counts_N)
    return metrics


def retrieval_of(
    t2i_M: np.ndarray, i2t_N: np.ndarray, image_M: np.ndarray, *, among_1000: bool = False
) -> dict[str, Any]:
    """Return the scores for these ranks; `among_1000` adds the R@1 estimate, which takes 0.1 s.

    `chance` is the chance level of text-to-image R@1; `chances` has those of all metrics.
    """
    metrics = metrics_of(t2i_M, i2t_N, image_M)
    hits_KN = np.stack([metric.hits_N for metric in metrics.values()])
    counts_KN = np.stack([metric.counts_N for metric in metrics.values()])
    scores: dict[str, Any] = {name: metric.value for name, metric in metrics.items()}
    scores |= {"candidates": len(i2t_N), "captions": len(t2i_M), "chance": 1 / len(i2t_N)}
    scores["chances"] = {name: metric.chance for name, metric in metrics.items()}
    scores["intervals"] = dict(zip(metrics, mean_intervals(hits_KN, counts_KN), strict=True))
    if among_1000:
        estimate = estimate_recall(t2i_M, image_M, len(i2t_N))
        scores["r1_among_1000"] = estimate.to_dict() if estimate else None
    return scores


def in_batches(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray, size: int | None
) -> dict[str, dict[str, Any]]:
    """`in_batch`: accuracy in batches, of each image that has captions and the first of them; nothing if too few."""
    if not size or len(np.unique(image_M)) < size:
        return {}
    return {"in_batch": batch_accuracy(image_NE, text_ME, size, image_M=image_M)}


def batch_accuracy(
    image_NE: np.ndarray,
    text_ME: np.ndarray,
    size: int,
    repeats: int = 100,
    image_M: np.ndarray | None = None,
) -> dict[str, Any]:
    """Accuracy within random batches of `size` pairs, both ways averaged: what published training logs call accuracy.

    A pair is an image and the first of its captions; without image_M each caption is that of the image in its row.
    Averaged over `repeats` random partitions of the pairs; pairs left over by a partition sit it out.
    """
    asked_P, caption_P = np.unique(
        np.arange(len(text_ME)) if image_M is None else image_M, return_index=True
    )
    count = len(asked_P) // size * size
    at_once = max(1, BLOCK * BLOCK // (size * max(size, image_NE.shape[1])))
    draw = generator(0, "partitions")
    hits_P, shows_P = np.zeros(len(asked_P)), np.zeros(len(asked_P))
    for _ in range(repeats):
        batches = draw.permutation(len(asked_P))[:count].reshape(-1, size)
        for first in range(0, len(batches), at_once):
            rows_Gs = batches[first : first + at_once]
            texts_GsE, images_GsE = text_ME[caption_P[rows_Gs]], image_NE[asked_P[rows_Gs]]
            scores_Gss = np.einsum("gie,gje->gij", texts_GsE, images_GsE, optimize=True)
            own_Gs = np.einsum("gii->gi", scores_Gss)
            t2i_Gs = (scores_Gss >= own_Gs[:, :, None]).sum(axis=2) == 1
            i2t_Gs = (scores_Gss >= own_Gs[:, None, :]).sum(axis=1) == 1
            hits_P[rows_Gs] += (t2i_Gs + i2t_Gs.astype(float)) / 2
            shows_P[rows_Gs] += 1
    return {
        "size": size,
        "accuracy": float(hits_P.sum() / shows_P.sum()),
        "interval": bootstrap_interval(hits_P, shows_P),
        "chance": 1 / size,
    }


THUMBNAIL = 8


def linear_baseline(train: Pairs, held_out: Pairs, ridge: float = 1.0) -> float:
    """A floor for scores on drawn images: text-to-image R@1 of ridge regression from the words of a caption to
    an 8x8 thumbnail, ranked by distance."""
    captions = [options[0] for options in train.captions]
    index = {
        word: column
        for column, word in enumerate(sorted({word for text in captions for word in _words(text)}))
    }
    words = _bags(captions, index)
    thumbnails = _thumbnails(train.pixels[:])
    weights = np.linalg.solve(
        words.T @ words + ridge * np.eye(words.shape[1]), words.T @ thumbnails
    )
    guesses = _bags([captions[0] for captions in held_out.captions], index) @ weights
    candidates = _thumbnails(held_out.pixels[:])
    nearest = [((candidates - guess) ** 2).sum(axis=1).argmin() for guess in guesses]
    return float(np.mean(nearest == np.arange(len(held_out))))


def _words(caption: str) -> list[str]:
    return re.findall(r"[a-z-]+", caption)


def _bags(captions: list[str], index: dict[str, int]) -> np.ndarray:
    bags = np.zeros((len(captions), len(index) + 1))
    bags[:, -1] = 1  # the intercept
    for row, caption in enumerate(captions):
        for word in _words(caption):
            if word in index:
                bags[row, index[word]] += 1
    return bags


def _thumbnails(pixels: np.ndarray) -> np.ndarray:
    side = pixels.shape[1] // THUMBNAIL
    images = (image[: side * THUMBNAIL, : side * THUMBNAIL] for image in pixels)
    blocks = (
        image.reshape(THUMBNAIL, side, THUMBNAIL, side, 3).mean(axis=(1, 3)) for image in images
    )
    return np.stack([block.reshape(-1) / 255 for block in blocks])

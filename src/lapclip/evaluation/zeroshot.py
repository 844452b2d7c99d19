"""Telling classes apart that a model was never trained to tell apart: each class is a few sentences with its name
(`lapclip.prompts`).

Shapes: N images, C classes, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lapclip.evaluation.intervals import mean_intervals, resamples, share_interval, wilson_interval
from lapclip.evaluation.ranks import blocks, exact, grid_scale


class Answers(NamedTuple):
    """What each image is taken for. A tie counts against the model: then it is the other class."""

    rank_N: np.ndarray
    """The rank of the image's own class, from 1."""
    guess_N: np.ndarray
    own_N: np.ndarray
    """The score of its own class."""
    rival_N: np.ndarray
    """The best score of another class."""


def class_answers(image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray) -> Answers:
    """Each image against all classes, in blocks of images, without rounding, so that equal classes tie."""
    image_scale, class_scale = grid_scale(image_NE), grid_scale(class_CE)
    exact_CE = exact(class_CE, class_scale)
    found = []
    for at in blocks(len(image_NE)):
        scores_bC = exact(image_NE[at], image_scale) @ exact_CE.T
        rows_b, label_b = np.arange(len(scores_bC)), label_N[at]
        own_b = scores_bC[rows_b, label_b]
        rank_b = (~(scores_bC < own_b[:, None])).sum(axis=1)
        scores_bC[rows_b, label_b] = -np.inf
        rival_b = scores_bC.argmax(axis=1)
        guess_b = np.where(rank_b == 1, label_b, rival_b)
        unit = image_scale * class_scale
        found.append((rank_b, guess_b, own_b * unit, scores_bC[rows_b, rival_b] * unit))
    return Answers(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def accuracy(image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray) -> float:
    """The share of images that are taken for their own class. A tie counts against the model."""
    return float((class_answers(image_NE, class_CE, label_N).rank_N == 1).mean())


def zeroshot_of(answers: Answers, label_N: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Top-1, top-5 and recall of each class, with intervals and chance, and what is taken for what.

    `confusion` has [class, taken for, images] where there are any, classes by their index: a matrix of many classes
    is nearly empty. Top-5 of five classes or fewer is 1 and says nothing.
    """
    hits = {
        "top1": (answers.rank_N <= 1).astype(float),
        "top5": (answers.rank_N <= 5).astype(float),
    }
    found = mean_intervals(np.stack(list(hits.values())), np.ones((2, len(label_N))))
    counts_C = np.bincount(label_N, minlength=len(classes))
    right_C = np.bincount(label_N, weights=hits["top1"], minlength=len(classes))
    there = counts_C > 0
    mean_per_class = float((right_C[there] / counts_C[there]).mean())
    kinds, times = np.unique(
        np.stack([label_N, answers.guess_N], axis=1), axis=0, return_counts=True
    )
    return {
        "top1": float(hits["top1"].mean()),
        "top5": float(hits["top5"].mean()),
        "mean_per_class": mean_per_class,
        "classes": len(classes),
        "pictures": len(label_N),
        "chance": {
            "top1": 1 / len(classes),
            "top5": min(1.0, 5 / len(classes)),
            "mean_per_class": 1 / len(classes),
        },
        "largest_class": float(counts_C.max() / len(label_N)),
        "intervals": {
            **dict(zip(hits, found, strict=True)),
            "mean_per_class": share_interval(
                draw_mean_per_class(hits["top1"], label_N), mean_per_class, len(label_N)
            ),
        },
        "per_class": [
            {
                "name": name,
                "pictures": int(counts_C[at]),
                "recall": float(right_C[at] / counts_C[at]) if counts_C[at] else None,
                "interval": wilson_interval(float(right_C[at]), int(counts_C[at])),
            }
            for at, name in enumerate(classes)
        ],
        "confusion": np.column_stack([kinds, times]).tolist(),
    }


def draw_mean_per_class(hits_N: np.ndarray, label_N: np.ndarray) -> np.ndarray:
    """The mean with the images drawn again and again; a class of which none was drawn sits that repeat out."""
    order = np.argsort(label_N, kind="stable")
    firsts = np.flatnonzero(np.diff(label_N[order], prepend=-1))
    means = []
    for weights_rN in resamples(len(label_N)):
        drawn_rC = np.add.reduceat(weights_rN[:, order], firsts, axis=1)
        right_rC = np.add.reduceat(weights_rN[:, order] * hits_N[order], firsts, axis=1)
        recall_rC = right_rC / np.maximum(drawn_rC, 1)
        means.append(recall_rC.sum(axis=1) / (drawn_rC > 0).sum(axis=1))
    return np.concatenate(means)

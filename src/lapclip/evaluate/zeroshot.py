"""Telling classes apart that a model was never trained to tell apart: each class is a few sentences with its name.

Shapes: N pictures, C classes, T templates, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lapclip.errors import ConfigError
from lapclip.evaluate.intervals import mean_intervals, percentiles, resamples, wilson_interval

TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a picture of a {}.",
    "a close-up photo of a {}.",
    "a {}.",
)
"""Used where none are given. The first is CLIP's own (Radford et al. 2021, section 3.1.4); the others vary it."""


def read_templates(text: str) -> list[str]:
    """Templates separated by vertical bars, each with {} for the class."""
    templates = [part.strip() for part in text.split("|") if part.strip()]
    for template in templates:
        if "{}" not in template:
            raise ConfigError(
                f"The template {template!r} has no {{}} for the class.", hint='--templates "a photo of a {}."'
            )
    return templates or list(TEMPLATES)


def class_embeddings(
    encode_text: Callable[[Sequence[str]], np.ndarray], classes: Sequence[str], templates: Sequence[str]
) -> np.ndarray:
    """A unit-length row per class: the mean of its sentences' embeddings, made unit length again, as CLIP does."""
    # Replaced, not formatted: a class name may hold braces. Folder names write spaces as underscores.
    sentences = [template.replace("{}", name.replace("_", " ")) for name in classes for template in templates]
    means_CE = encode_text(sentences).reshape(len(classes), len(templates), -1).mean(axis=1)
    return means_CE / np.maximum(np.linalg.norm(means_CE, axis=1, keepdims=True), 1e-12)


def accuracy(image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray) -> float:
    """The share of pictures whose own class scores above all others. A tie counts against the model."""
    scores_NC = image_NE @ class_CE.T
    own_N1 = np.take_along_axis(scores_NC, label_N[:, None], axis=1)
    return float(np.mean((~(scores_NC < own_N1)).sum(axis=1) == 1))


def zeroshot(image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Top-1, top-5 and recall of each class, with intervals and chance; rows of the confusion matrix are true classes.

    A tie counts against the model. Top-5 of five classes or fewer is 1 and says nothing.
    """
    scores_NC = image_NE @ class_CE.T
    own_N1 = np.take_along_axis(scores_NC, label_N[:, None], axis=1)
    rank_N = (~(scores_NC < own_N1)).sum(axis=1)
    hits = {"top1": (rank_N <= 1).astype(float), "top5": (rank_N <= 5).astype(float)}
    found = mean_intervals(np.stack(list(hits.values())), np.ones((2, len(label_N))))
    counts_C = np.bincount(label_N, minlength=len(classes))
    right_C = np.bincount(label_N, weights=hits["top1"], minlength=len(classes))
    there = counts_C > 0
    confusion_CC = np.zeros((len(classes), len(classes)), dtype=np.int64)
    np.add.at(confusion_CC, (label_N, scores_NC.argmax(axis=1)), 1)
    return {
        "top1": float(hits["top1"].mean()),
        "top5": float(hits["top5"].mean()),
        "mean_per_class": float((right_C[there] / counts_C[there]).mean()),
        "classes": len(classes),
        "pictures": len(label_N),
        "chance": {"top1": 1 / len(classes), "top5": min(1.0, 5 / len(classes)), "mean_per_class": 1 / len(classes)},
        "largest_class": float(counts_C.max() / len(label_N)),
        "intervals": {
            **dict(zip(hits, found, strict=True)),
            "mean_per_class": _mean_per_class_interval(hits["top1"], label_N),
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
        "confusion": confusion_CC.tolist(),
    }


def _mean_per_class_interval(hits_N: np.ndarray, label_N: np.ndarray) -> list[float]:
    """Over drawn pictures; a class of which none was drawn sits that repeat out."""
    order = np.argsort(label_N, kind="stable")
    firsts = np.flatnonzero(np.diff(label_N[order], prepend=-1))
    means = []
    for weights_rN in resamples(len(label_N)):
        drawn_rC = np.add.reduceat(weights_rN[:, order], firsts, axis=1)
        right_rC = np.add.reduceat(weights_rN[:, order] * hits_N[order], firsts, axis=1)
        recall_rC = right_rC / np.maximum(drawn_rC, 1)
        means.append(recall_rC.sum(axis=1) / (drawn_rC > 0).sum(axis=1))
    return percentiles(np.concatenate(means))

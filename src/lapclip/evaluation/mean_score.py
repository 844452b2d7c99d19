"""One score for a data set, with bootstrap draws, so that two models can be compared on the same images.

Pairs are scored by mean recall: the mean of R@1, R@5 and R@10, both ways. Classes are scored by the mean recall of the
classes, because a model that always names the largest class has a high top-1 accuracy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from lapclip.evaluation import RANKS, WAYS
from lapclip.evaluation.intervals import percentiles, resamples
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.retrieval import metrics_of
from lapclip.evaluation.zeroshot import class_answers, draw_mean_per_class

MEAN_RECALL = "mean recall"
MEAN_CLASS_RECALL = "mean recall of the classes"


@dataclass(frozen=True)
class MeanScore:
    """Score of one model on one data set."""

    measure: str
    value: float
    chance: float
    draws: np.ndarray
    """Value in each bootstrap draw. Every model is scored on the same draws."""
    recalls: dict[str, float]
    """Recalls by their names, as "t2i_r1". Empty for classes."""

    def change_interval(self, before: MeanScore) -> list[float]:
        """Return the 95 % interval of the change since `before`.

        It is narrower than two intervals side by side suggest, because both models are scored on the same images.
        """
        return percentiles(self.draws - before.draws)


def score_pairs(images: np.ndarray, texts: np.ndarray, image_of_text: np.ndarray) -> MeanScore:
    """Score unit-length vectors of images and captions by mean recall."""
    metrics = metrics_of(*ranks(images, texts, image_of_text), image_of_text)
    recalls = {}
    for way, rank in itertools.product(WAYS, RANKS):
        recalls[f"{way}_r{rank}"] = metrics[f"{way}_r{rank}"]
    hits = np.stack([recall.hits_N for recall in recalls.values()], axis=1)  # image x recall
    counts = np.stack([recall.counts_N for recall in recalls.values()], axis=1)
    draws = []
    for weights in resamples(len(images)):  # draw x image
        drawn = (weights @ hits) / np.maximum(weights @ counts, 1e-12)
        draws.append(drawn.mean(axis=1))
    return MeanScore(
        MEAN_RECALL,
        float(np.mean([recall.value for recall in recalls.values()])),
        float(np.mean([recall.chance for recall in recalls.values()])),
        np.concatenate(draws),
        {name: recall.value for name, recall in recalls.items()},
    )


def score_classes(images: np.ndarray, classes: np.ndarray, labels: np.ndarray) -> MeanScore:
    """Score unit-length vectors of images and classes by the mean recall of the classes that have images."""
    is_right = (class_answers(images, classes, labels).rank_N == 1).astype(float)
    recalls = [is_right[labels == label].mean() for label in np.unique(labels)]
    draws = draw_mean_per_class(is_right, labels)
    return MeanScore(MEAN_CLASS_RECALL, float(np.mean(recalls)), 1 / len(classes), draws, {})

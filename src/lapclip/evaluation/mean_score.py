"""One score for a data set, with bootstrap draws, so that two models can be compared on the same images.

Pairs are scored by mean recall: the mean of R@1, R@5 and R@10, both ways. Classes are scored by the mean recall of the
classes, because a model that always names the largest class has a high top-1 accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lapclip.evaluation import RANKS
from lapclip.evaluation.intervals import percentiles, resamples
from lapclip.evaluation.ranks import chance_metrics, ranks
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
    t2i_ranks, i2t_ranks = ranks(images, texts, image_of_text)
    captions = np.bincount(image_of_text, minlength=len(images)).astype(float)
    has_caption = captions > 0
    recalls, chances, hits, counts = {}, {}, [], []
    t2i_chance = chance_metrics(len(images), np.ones(1), RANKS)
    i2t_chance = chance_metrics(len(texts), captions[has_caption], RANKS)
    for rank in RANKS:
        found = t2i_ranks <= rank
        recalls[f"t2i_r{rank}"] = float(found.mean())
        chances[f"t2i_r{rank}"] = t2i_chance[f"r{rank}"]
        hits.append(np.bincount(image_of_text, weights=found, minlength=len(images)))
        counts.append(captions)
        found = (i2t_ranks <= rank) & has_caption
        recalls[f"i2t_r{rank}"] = float(found[has_caption].mean())
        chances[f"i2t_r{rank}"] = i2t_chance[f"r{rank}"]
        hits.append(found.astype(float))
        counts.append(has_caption.astype(float))
    image_hits, image_counts = np.stack(hits, axis=1), np.stack(counts, axis=1)  # image x recall
    draws = []
    for weights in resamples(len(images)):  # draw x image
        drawn = (weights @ image_hits) / np.maximum(weights @ image_counts, 1e-12)
        draws.append(drawn.mean(axis=1))
    return MeanScore(
        MEAN_RECALL,
        float(np.mean(list(recalls.values()))),
        float(np.mean(list(chances.values()))),
        np.concatenate(draws),
        recalls,
    )


def score_classes(images: np.ndarray, classes: np.ndarray, labels: np.ndarray) -> MeanScore:
    """Score unit-length vectors of images and classes by the mean recall of the classes that have images."""
    is_right = (class_answers(images, classes, labels).rank_N == 1).astype(float)
    recalls = [is_right[labels == label].mean() for label in np.unique(labels)]
    draws = draw_mean_per_class(is_right, labels)
    return MeanScore(MEAN_CLASS_RECALL, float(np.mean(recalls)), 1 / len(classes), draws, {})

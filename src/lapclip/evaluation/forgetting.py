"""How a model's scores change on the way from its start to its end: one metric for each data set, how sure it is, and
how sure its change is.

The metric of pairs is the mean of the six recalls, of classes the mean over them: a model that always says the largest
class knows nothing, and top-1 would not see it. A change is drawn from the same images before
and after, so it is surer than two intervals beside each other look.

Shapes: N images, M captions, E embedding, C classes, r draws, K metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.evaluation.intervals import percentiles, resamples, share_interval
from lapclip.evaluation.metric_names import RANKS, WAYS
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.retrieval import retrieval_of
from lapclip.evaluation.zeroshot import class_answers, draw_mean_per_class, zeroshot_of

RECALLS = [f"{way}_r{rank}" for way in WAYS for rank in RANKS]
MEAN_RECALL, MEAN_PER_CLASS = "mean recall", "zero-shot, mean of classes"


@dataclass(frozen=True)
class Scored:
    """A data set at one alpha."""

    value: float
    chance: float
    images: int
    """How many were asked about."""
    drawn_r: np.ndarray
    """The value with the images drawn again, by the same draws at each alpha."""
    scores: dict[str, Any]
    known: bool
    """Whether it is clearly above chance: what a model does not know it cannot forget."""

    @property
    def interval(self) -> list[float]:
        return share_interval(self.drawn_r, self.value, self.images)


def score_pairs(image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray) -> Scored:
    """Recall both ways, and the mean of it."""
    t2i_M, i2t_N = ranks(image_NE, text_ME, image_M)
    scores = retrieval_of(t2i_M, i2t_N, image_M)
    captions_N = np.bincount(image_M, minlength=len(image_NE)).astype(float)
    asked_N = (captions_N > 0).astype(float)
    hits = [np.bincount(image_M, weights=t2i_M <= rank, minlength=len(image_NE)) for rank in RANKS]
    hits += [(i2t_N <= rank) * asked_N for rank in RANKS]
    hits_KN, counts_KN = np.stack(hits), np.stack([captions_N] * len(RANKS) + [asked_N] * len(RANKS))
    drawn_r = np.concatenate([
        ((weights_rN @ hits_KN.T) / np.maximum(weights_rN @ counts_KN.T, 1e-12)).mean(axis=1)
        for weights_rN in resamples(len(image_NE))
    ])  # fmt: skip
    value, chance = (float(np.mean([found[name] for name in RECALLS])) for found in (scores, scores["chances"]))
    asked = int(asked_N.sum())
    return Scored(value, chance, asked, drawn_r, scores, share_interval(drawn_r, value, asked)[0] > chance)


def score_classes(image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray, classes: Sequence[str]) -> Scored:
    """Zero-shot classification."""
    answers = class_answers(image_NE, class_CE, label_N)
    found = zeroshot_of(answers, label_N, classes)
    scores = {name: value for name, value in found.items() if name not in ("per_class", "confusion")}
    right_N = (answers.rank_N == 1).astype(float)
    value, chance = scores["mean_per_class"], scores["chance"]["mean_per_class"]
    known = scores["intervals"]["mean_per_class"][0] > chance
    return Scored(value, chance, len(label_N), draw_mean_per_class(right_N, label_N), scores, known)


def curve_of(alphas: Sequence[float], scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """The metric over alpha with its interval, and its change since the start with its own."""
    first = scored[0]
    return [
        {
            "alpha": alpha,
            "value": one.value,
            "interval": one.interval,
            "change": one.value - first.value,
            "change_interval": percentiles(one.drawn_r - first.drawn_r),
        }
        for alpha, one in zip(alphas, scored, strict=True)
    ]

"""How a model's scores change on the way from its start to its end: one metric for each data set, how sure it is,
how sure its change is, and which of the models in between to take.

The metric of pairs is the mean of the six recalls, of classes the mean over them: a model that always says the largest
class knows nothing, and top-1 would not see it. A change is drawn from the same images before
and after, so it is surer than two intervals beside each other look.

Shapes: N images, M captions, E embedding, C classes, r draws, K metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lapclip.evaluation import RANKS, WAYS
from lapclip.evaluation.intervals import percentiles, resamples, share_interval
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


MOST_LOST = 0.1
"""Share of the start's score that a check may lose."""


class Recommendation(NamedTuple):
    alpha: float
    why: str


def recommend(new: dict[str, Any], checks: Sequence[dict[str, Any]]) -> Recommendation:
    """The alpha to take, from the curves of the new data and of the checks.

    Of the alphas above 0 that lose at most a tenth of what the start had on every check that decides, the one with the
    best metric on the new data, among equals the smallest. Where none loses so little, the one that loses least. Where
    the start has a better metric on the new data than that one, the start.
    """
    start, *others = new["curve"]
    deciding = [check for check in checks if check["decides"]]
    lost = {point["alpha"]: max([lost_share(check, at) for check in deciding], default=0.0)
            for at, point in enumerate(others, 1)}  # fmt: skip
    close = [point for point in others if lost[point["alpha"]] <= MOST_LOST]
    if close:
        best = max(close, key=lambda point: point["value"])
        why = "the best on the new data of those that lose at most 10 % on every check"
        if not deciding:
            why = "the best on the new data; no check decides, because the start was not clearly above chance on any"
            why = why if checks else "the best on the new data; there is no check"
    else:
        best = min(others, key=lambda point: lost[point["alpha"]])
        why = f"every alpha loses more than 10 % on some check; this one loses least, {lost[best['alpha']]:.0%}"
    if best["value"] < start["value"]:
        return Recommendation(start["alpha"], "the start itself is better on the new data than what could be kept")
    return Recommendation(best["alpha"], why)


def lost_share(check: dict[str, Any], at: int) -> float:
    """How much of the start's score a check has lost at one of its points; below 0 where it gained."""
    before, after = check["curve"][0]["value"], check["curve"][at]["value"]
    return (before - after) / before if before else 0.0


def point_at(found: dict[str, Any], alpha: float) -> dict[str, Any]:
    """The point of a curve at an alpha."""
    return next(point for point in found["curve"] if point["alpha"] == alpha)


def summary(new: dict[str, Any], checks: Sequence[dict[str, Any]], alpha: float) -> str:
    """One sentence, or two, for a person."""
    deciding = [check for check in checks if check["decides"]]
    end = new["curve"][-1]["alpha"]
    parts = [_change(new, end), *(_change(check, end) for check in deciding)]
    text = f"Fine-tuning {_joined(parts)}."
    if alpha == end:
        return f"{text} Its end is also what is recommended."
    if alpha == new["curve"][0]["alpha"]:
        return f"{text} Recommended is the start, as it was."
    parts = [_change(new, alpha), *(_change(check, alpha) for check in deciding)]
    return f"{text} At alpha {alpha:g}, which is recommended, it {_joined(parts)}."


def _change(found: dict[str, Any], alpha: float) -> str:
    """What happened to one metric: in points, beside what it was."""
    before, point = found["curve"][0], point_at(found, alpha)
    change, (low, high) = point["change"], point["change_interval"]
    noise = "" if low > 0 or high < 0 else ", which may be noise" if change else ""
    points = f"{abs(change) * 100:.1f}"
    from_to = f"{before['value']:.1%} to {point['value']:.1%}{noise}"
    if points == "0.0":
        return f"kept {before['value']:.1%} on {found['name']}"
    return f"{'gained' if change > 0 else 'lost'} {points} points on {found['name']} ({from_to})"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]

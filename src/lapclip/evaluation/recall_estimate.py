"""Text-to-image R@1 among 1,000 candidates: measured, or predicted where fewer were held out.

R@1 falls as candidates are added, so results can be compared only at the same number of them. The
prediction assumes that each caption has a margin, and that any other image beats the caption's own
image with a probability that depends on the margin only (`rival_probability`). Margins are normally
distributed over captions. Their mean and spread are fitted to the ranks, on a grid; the weights of
the grid give the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.evaluation.intervals import bootstrap_interval

REFERENCE_CANDIDATES = 1000
MIN_CANDIDATES = 5  # fewer say nothing about 1,000
RATINGS = {"chance": 0.0, "weak": 0.005, "fair": 0.05, "good": 0.2, "strong": 0.5}  # lowest R@1
MARGINS = np.arange(-5, 11, 0.1)
MEANS = np.arange(-1, 8, 0.05)
SPREADS = np.geomspace(0.6, 1.8, 10)
TYPICAL_MEAN = 2.5  # R@1 among 1,000 of about 13 %; 8 to 25 % need 2.2 to 3
TYPICAL_SPREAD = 1.0  # fitted to 1,000 photos of Flickr8k: 0.95 to 1.05 for recipe heads
SPREAD_TOLERANCE = 0.07  # standard deviation of its logarithm; a few hundred ranks outweigh it
# Shapes of `rival_probability` with their shares in the prediction, which ranks among few candidates
# cannot tell apart. 0.03 predicts the same from 26, 100 and 300 photos of Flickr8k.
CURVATURES = {0.025: 0.25, 0.03: 0.5, 0.04: 0.25}
# Share of the design effect that counts: with 1, 97 to 100 % of the 95 % intervals hold the truth.
DESIGN_EFFECT_SHARE = 0.75


@dataclass(frozen=True)
class RecallEstimate:
    """R@1 among 1,000 candidates."""

    recall: float
    interval: tuple[float, float]
    """95 % interval."""
    measured: bool
    """Whether there were at least 1,000 candidates. False for a prediction from fewer."""

    @property
    def rating(self) -> str:
        """Word for the recall, or two where the interval spans several: "weak to fair"."""
        lowest, highest = (rate(end) for end in self.interval)
        return lowest if lowest == highest else f"{lowest} to {highest}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "recall": self.recall,
            "interval": list(self.interval),
            "measured": self.measured,
            "rating": self.rating,
        }


def rate(recall: float) -> str:
    """Return the word for an R@1 among 1,000 candidates."""
    return [word for word, lowest in RATINGS.items() if recall >= lowest][-1]


def estimate_recall(
    ranks: np.ndarray, image_of_caption: np.ndarray, candidates: int
) -> RecallEstimate | None:
    """Estimate R@1 among 1,000 candidates from each caption's rank among `candidates` images.

    Returns None with fewer than 5 candidates.
    """
    if candidates >= REFERENCE_CANDIDATES:
        return _measure(ranks, image_of_caption, candidates)
    if candidates < MIN_CANDIDATES:
        return None
    return _predict(ranks, image_of_caption, candidates)


def _measure(ranks: np.ndarray, image_of_caption: np.ndarray, candidates: int) -> RecallEstimate:
    """Return the mean R@1 over all choices of 1,000 candidates that include the right one."""
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, candidates)))])
    others, chosen = candidates - 1, REFERENCE_CANDIDATES - 1
    worse = candidates - ranks  # other images that score lower than the caption's own
    ways = log_factorials[worse] - log_factorials[np.maximum(worse - chosen, 0)]
    all_ways = log_factorials[others] - log_factorials[others - chosen]
    found = np.where(worse >= chosen, np.exp(ways - all_ways), 0.0)
    found_by_image = np.bincount(image_of_caption, weights=found, minlength=candidates)
    captions = np.bincount(image_of_caption, minlength=candidates)
    low, high = bootstrap_interval(found_by_image, captions)
    return RecallEstimate(float(found.mean()), (low, high), measured=True)


def _predict(ranks: np.ndarray, image_of_caption: np.ndarray, candidates: int) -> RecallEstimate:
    means, spreads = (axis.ravel() for axis in np.meshgrid(MEANS, SPREADS))
    # One row for each pair of mean and spread: the distribution of margins over captions.
    margin_weights = np.exp(-0.5 * ((MARGINS - means[:, None]) / spreads[:, None]) ** 2)
    margin_weights /= margin_weights.sum(axis=1, keepdims=True)
    log_prior = -0.5 * (np.log(spreads / TYPICAL_SPREAD) / SPREAD_TOLERANCE) ** 2
    log_prior -= np.log1p((means - TYPICAL_MEAN) ** 2)  # Cauchy: hardly counts against clear ranks
    # Captions of one image resemble each other, so they count as fewer than they are.
    effect = DESIGN_EFFECT_SHARE * design_effect(1 / ranks, image_of_caption)

    recalls, weights = [], []
    for curvature, share in CURVATURES.items():
        beaten = rival_probability(MARGINS, curvature)
        log_likelihoods = _log_likelihoods(ranks, candidates, beaten, margin_weights)
        log_weights = log_prior + log_likelihoods / effect
        curve_weights = np.exp(log_weights - log_weights.max())
        recalls.append(margin_weights @ (1 - beaten) ** (REFERENCE_CANDIDATES - 1))
        weights.append(share * curve_weights / curve_weights.sum())
    return _summarize(np.concatenate(recalls), np.concatenate(weights))


def _summarize(recalls: np.ndarray, weights: np.ndarray) -> RecallEstimate:
    """Return the weighted mean and the shortest interval with 95 % of the weight."""
    ascending = np.argsort(recalls)
    cumulative = np.cumsum(weights[ascending])
    left_out_below = np.linspace(0, 0.05, 51)
    lows = np.interp(left_out_below, cumulative, recalls[ascending])
    highs = np.interp(left_out_below + 0.95, cumulative, recalls[ascending])
    shortest = np.argmin(highs - lows)
    interval = (float(lows[shortest]), float(highs[shortest]))
    return RecallEstimate(float(weights @ recalls), interval, measured=False)


def rival_probability(margins: np.ndarray, curvature: float) -> np.ndarray:
    """Return the probability that another image beats the right one, for captions of these margins.

    Curvature 0 is the logistic curve, 0.07 nearly the normal distribution.
    """
    return 1 / (1 + np.exp(1.6 * margins + curvature * margins**3))


def _log_likelihoods(
    ranks: np.ndarray, candidates: int, beaten: np.ndarray, margin_weights: np.ndarray
) -> np.ndarray:
    """Return the log-likelihood of all ranks for each row of margin weights, up to a constant."""
    values, counts = np.unique(ranks, return_counts=True)
    rivals = values[:, None] - 1  # images that beat the right one; binomial for a given margin
    by_margin = rivals * np.log(beaten) + (candidates - 1 - rivals) * np.log1p(-beaten)
    by_margin -= by_margin.max(axis=1, keepdims=True)  # or exp would underflow
    return np.log(np.exp(by_margin) @ margin_weights.T + 1e-300).T @ counts


def design_effect(values: np.ndarray, groups: np.ndarray) -> float:
    """Return how many values of one group count as a single independent value.

    1 if groups do not matter, the mean group size if all values of a group are equal.
    """
    sizes = np.bincount(groups)
    present = sizes > 0
    group_means = np.bincount(groups, weights=values)[present] / sizes[present]
    mean_size = float(sizes[present].mean())
    variance = float(values.var())
    if variance == 0 or len(group_means) < 2:
        return mean_size
    return float(np.clip(mean_size * group_means.var(ddof=1) / variance, 1, mean_size))

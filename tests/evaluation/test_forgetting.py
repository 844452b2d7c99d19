"""Metrics on the way from start to end, and the alpha to take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lapclip.evaluation.forgetting import (
    RECALLS,
    curve_of,
    recommend,
    score_classes,
    score_pairs,
    summary,
)
from lapclip.evaluation.retrieval import retrieval

from .embeddings import noisy_pairs


def found(
    name: str, values: list[float], *, decides: bool = True, noise: float = 0.0
) -> dict[str, Any]:
    """A curve over alphas 0, 0.5 and 1."""
    points = [
        {"alpha": at / 2, "value": value, "change": value - values[0],
         "change_interval": [value - values[0] - noise, value - values[0] + noise]}
        for at, value in enumerate(values)
    ]  # fmt: skip
    return {"name": name, "curve": points, "decides": decides}


def test_the_metric_of_pairs_is_the_mean_of_the_six_recalls() -> None:
    images, texts, owner = noisy_pairs(60, 1.0, 2)
    scored, plain = score_pairs(images, texts, owner), retrieval(images, texts, owner)
    assert scored.value == pytest.approx(np.mean([plain[name] for name in RECALLS]))
    assert scored.chance == pytest.approx(np.mean([plain["chances"][name] for name in RECALLS]))
    assert scored.scores["t2i_r1"] == plain["t2i_r1"]
    low, high = scored.interval
    assert low < scored.value < high
    assert scored.known
    # The same draws as everywhere: where each image has as many captions, means of draws are near the value.
    assert scored.drawn_r.mean() == pytest.approx(scored.value, abs=0.02)


def test_images_without_captions_are_candidates_and_no_questions() -> None:
    images, texts, owner = noisy_pairs(30, 0.5)
    scored, plain = (
        score_pairs(images, texts[:20], owner[:20]),
        retrieval(images, texts[:20], owner[:20]),
    )
    assert scored.value == pytest.approx(np.mean([plain[name] for name in RECALLS]))
    assert scored.drawn_r.mean() == pytest.approx(scored.value, abs=0.03)


def test_what_is_not_clearly_above_chance_is_not_known() -> None:
    images, _, owner = noisy_pairs(100, 0.0)
    strangers = np.random.default_rng(5).permutation(images)
    assert not score_pairs(images, strangers, owner).known


def test_a_model_that_always_says_the_largest_class_knows_nothing() -> None:
    labels = np.array([0] * 80 + [1] * 10 + [2] * 10)
    always = np.tile(np.eye(3)[0], (100, 1))
    scored = score_classes(always, np.eye(3), labels, ["a", "b", "c"])
    assert scored.scores["top1"] == 0.8
    assert scored.value == pytest.approx(1 / 3)
    assert not scored.known
    right = score_classes(np.eye(3)[labels], np.eye(3), labels, ["a", "b", "c"])
    assert right.known
    assert right.value == 1.0
    assert "confusion" not in right.scores


def test_a_change_is_surer_than_two_intervals_beside_each_other() -> None:
    images, texts, owner = noisy_pairs(200, 1.2)
    slightly = texts + 0.02 * np.random.default_rng(1).normal(size=texts.shape)
    before, after = (score_pairs(images, rows, owner) for rows in (texts, slightly))
    first, last = curve_of([0.0, 1.0], [before, after])
    assert first["change_interval"] == [0.0, 0.0]
    low, high = last["change_interval"]
    assert low <= last["change"] <= high
    assert high - low < (last["interval"][1] - last["interval"][0]) / 2


@pytest.mark.parametrize(
    ("new", "checks", "alpha", "why"),
    [
        ([0.1, 0.2, 0.3], [("a", [0.5, 0.5, 0.46])], 1.0, "at most 10 %"),
        ([0.1, 0.2, 0.3], [("a", [0.5, 0.46, 0.4])], 0.5, "at most 10 %"),
        ([0.1, 0.3, 0.3], [("a", [0.5, 0.5, 0.5])], 0.5, "at most 10 %"),  # of equals the smallest
        ([0.1, 0.2, 0.3], [("a", [0.5, 0.5, 0.5]), ("b", [0.5, 0.46, 0.2])], 0.5, "every check"),
        ([0.1, 0.2, 0.3], [("a", [0.5, 0.4, 0.3])], 0.5, "loses least, 20%"),
        ([0.3, 0.2, 0.1], [("a", [0.5, 0.5, 0.5])], 0.0, "the start itself is better"),
        ([0.1, 0.2, 0.3], [], 1.0, "there is no check"),
    ],
)
def test_the_recommended_alpha_follows_the_rule(
    new: list[float], checks: list[tuple[str, list[float]]], alpha: float, why: str
) -> None:
    best = recommend(found("photos", new), [found(name, values) for name, values in checks])
    assert best.alpha == alpha
    assert why in best.why


def test_a_check_that_was_not_known_does_not_decide() -> None:
    best = recommend(
        found("photos", [0.1, 0.2, 0.3]), [found("a", [0.02, 0.0, 0.0], decides=False)]
    )
    assert best.alpha == 1.0
    assert "no check decides" in best.why


def test_the_sentence_says_points_what_they_were_and_what_may_be_noise() -> None:
    new, check = (
        found("photos", [0.1, 0.2, 0.25], noise=0.01),
        found("clothes", [0.31, 0.31, 0.29], noise=0.03),
    )
    unknown = found("scenes", [0.1, 0.1, 0.1], decides=False)
    assert summary(new, [check, unknown], 0.5) == (
        "Fine-tuning gained 15.0 points on photos (10.0% to 25.0%) and lost 2.0 points on clothes (31.0% to 29.0%, "
        "which may be noise). At alpha 0.5, which is recommended, it gained 10.0 points on photos (10.0% to 20.0%) "
        "and kept 31.0% on clothes."
    )
    assert summary(new, [], 1.0).endswith("Its end is also what is recommended.")
    assert summary(new, [], 0.0).endswith("Recommended is the start, as it was.")

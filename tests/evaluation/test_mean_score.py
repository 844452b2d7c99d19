"""One score for a data set, with draws to compare models by."""

from __future__ import annotations

import numpy as np
import pytest

from lapclip.evaluation import RANKS, WAYS
from lapclip.evaluation.intervals import percentiles
from lapclip.evaluation.mean_score import score_classes, score_pairs
from lapclip.evaluation.retrieval import retrieval

from .embeddings import noisy_pairs

RECALLS = [f"{way}_r{rank}" for way in WAYS for rank in RANKS]


def test_pairs_are_scored_by_the_mean_of_the_six_recalls() -> None:
    images, texts, owner = noisy_pairs(60, 1.0, 2)
    score, plain = score_pairs(images, texts, owner), retrieval(images, texts, owner)
    assert score.recalls == {name: plain[name] for name in score.recalls}
    assert score.value == pytest.approx(np.mean([plain[name] for name in RECALLS]))
    assert score.chance == pytest.approx(np.mean([plain["chances"][name] for name in RECALLS]))
    low, high = percentiles(score.draws)
    assert low < score.value < high
    # The same draws as everywhere: where each image has as many captions, means of draws are near the value.
    assert score.draws.mean() == pytest.approx(score.value, abs=0.02)


def test_images_without_captions_are_candidates_and_no_queries() -> None:
    images, texts, owner = noisy_pairs(30, 0.5)
    score = score_pairs(images, texts[:20], owner[:20])
    plain = retrieval(images, texts[:20], owner[:20])
    assert score.value == pytest.approx(np.mean([plain[name] for name in RECALLS]))
    assert score.draws.mean() == pytest.approx(score.value, abs=0.03)


def test_a_model_that_always_names_the_largest_class_is_at_chance() -> None:
    labels = np.array([0] * 80 + [1] * 10 + [2] * 10)
    always = np.tile(np.eye(3)[0], (100, 1))
    score = score_classes(always, np.eye(3), labels)
    assert score.value == pytest.approx(1 / 3) == score.chance
    assert score_classes(np.eye(3)[labels], np.eye(3), labels).value == 1.0


def test_a_change_is_surer_than_two_intervals_side_by_side() -> None:
    images, texts, owner = noisy_pairs(200, 1.2)
    slightly = texts + 0.02 * np.random.default_rng(1).normal(size=texts.shape)
    before, after = score_pairs(images, texts, owner), score_pairs(images, slightly, owner)
    assert before.change_interval(before) == [0.0, 0.0]
    low, high = after.change_interval(before)
    assert low <= after.value - before.value <= high
    alone = percentiles(after.draws)
    assert high - low < (alone[1] - alone[0]) / 2

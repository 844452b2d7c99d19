from __future__ import annotations

import numpy as np
import pytest

from lapclip.evaluation import intervals
from lapclip.evaluation.intervals import (
    bootstrap_interval,
    mean_intervals,
    resamples,
    wilson_interval,
)


def test_interval_holds_the_true_rate_and_narrows_with_more_pairs() -> None:
    draw = np.random.default_rng(1)
    few, many = (draw.random(count) < 0.3 for count in (50, 5000))
    low, high = bootstrap_interval(many.astype(float), np.ones(5000))
    assert low < 0.3 < high
    few_low, few_high = bootstrap_interval(few.astype(float), np.ones(50))
    assert high - low < (few_high - few_low) / 5


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(2)
    held = [
        low <= 0.4 <= high
        for low, high in mean_intervals(
            (draw.random((300, 200)) < 0.4).astype(float), np.ones((300, 200))
        )
    ]
    assert 0.9 < np.mean(held) < 0.99


def test_images_are_drawn_not_captions() -> None:
    """Five captions that always agree are one answer, so their interval is that of the images."""
    hits = (np.random.default_rng(0).random(100) < 0.5).astype(float)
    assert bootstrap_interval(5 * hits, np.full(100, 5.0)) == pytest.approx(
        bootstrap_interval(hits, np.ones(100))
    )


def test_answers_that_all_agree_are_not_certain() -> None:
    counts = np.array([2.0, 3.0, 0.0, 5.0])  # the third image is no question
    none, every, some = mean_intervals(
        np.stack([0 * counts, counts, counts - (counts == 5)]), np.stack([counts] * 3)
    )
    assert none == wilson_interval(0, 3)
    assert every == wilson_interval(3, 3)
    assert none[0] == 0 < none[1] < 1
    assert 0 < some[0] < some[1] == 1


def test_each_draw_is_of_as_many_images_and_the_blocks_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = np.concatenate(list(resamples(37)))
    assert whole.shape == (1000, 37)
    assert (whole.sum(axis=1) == 37).all()
    monkeypatch.setattr(intervals, "CELLS", 100)
    np.testing.assert_array_equal(np.concatenate(list(resamples(37))), whole)


def test_many_images_are_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 37 * 300)
    assert sum(map(len, resamples(37))) == 300
    assert sum(map(len, resamples(370))) == intervals.LEAST_REPEATS


def test_wilson_knows_what_few_answers_say() -> None:
    # The textbook's example: 4 of 20 right is 8.07 % to 41.6 %.
    assert wilson_interval(4, 20) == pytest.approx([0.0807, 0.4160], abs=1e-4)
    assert wilson_interval(0, 0) == [0.0, 1.0]
    assert wilson_interval(3, 3)[0] < 0.5

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lapclip.searching.index import Entry, Index
from lapclip.searching.nearest import BOUND, nearest, rough_scores


def unit(count: int, width: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_fifty_thousand_images_against_plain_numpy(tmp_path: Path) -> None:
    count, width = 50_000, 128
    vectors = unit(count, width, 0)
    index = Index(tmp_path / "index")
    index.open()
    index.begin("synthetic", width)
    rows = index.append(vectors)
    index.put(Entry(0, f"{row}.jpg", 1, 1, f"{row:x}", None, 1, 1, row) for row in rows)
    table, mapped = index.snapshot("synthetic")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(table.numbers, np.arange(1, count + 1))
    for question in unit(3, width, 1):
        exact = vectors.astype(np.float16).astype(np.float64) @ question.astype(np.float64)
        assert np.abs(rough_scores(mapped, question) - exact).max() < BOUND
        best = np.argsort(-exact, kind="stable")
        for limit in (1, 20, 1000, count):
            places, scores = nearest(mapped, table.rows, table.numbers, question, limit)
            assert len(places) == limit
            assert np.abs(scores - exact[best[:limit]]).max() < 1e-6
            assert np.abs(exact[places] - exact[best[:limit]]).max() < 1e-6


def test_near_ties_that_float16_scores_confuse_come_in_their_true_order() -> None:
    """All images score about 0.9, closer to each other than float16 can say."""
    question = np.zeros(64, np.float32)
    question[0] = 1
    vectors = np.zeros((300, 64), np.float16)
    vectors[:, 0] = 0.9
    small = np.arange(300, dtype=np.float32) * 1e-7
    question[1:] = 0.01
    vectors[:, 1] = (small * 100).astype(np.float16)  # moves the score by 1e-7 a step
    numbers = np.arange(300)
    exact = vectors.astype(np.float64) @ question.astype(np.float64)
    assert len(np.unique(rough_scores(vectors, question))) < 5
    places, _ = nearest(vectors, numbers, numbers, question, 10)
    assert exact[places].min() >= np.sort(exact)[-10] - 1e-7


def test_rounding_beyond_the_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, question = unit(2000, 64, 2).astype(np.float16), unit(1, 64, 3)[0]
    exact = vectors.astype(np.float64) @ question.astype(np.float64)
    noise = np.random.default_rng(4).uniform(-0.2, 0.2, len(vectors)).astype(np.float32)
    monkeypatch.setattr(
        "lapclip.searching.nearest.rough_scores", lambda vectors, question: exact.astype(np.float32) + noise
    )
    places, _ = nearest(vectors, np.arange(2000), np.arange(2000), question, 10)
    assert places.tolist() == np.argsort(-exact)[:10].tolist()


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 8, 20])
def test_equal_scores_come_in_the_order_of_their_numbers(limit: int) -> None:
    vectors = np.array([0.5, 0.9, 0.5, 0.1, 0.5, 0.9, 0.5, 0.1], np.float16)[:, None] * np.ones((1, 4), np.float16)
    numbers = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    places, _ = nearest(vectors, np.arange(8), numbers, np.full(4, 0.5), limit)
    assert [int(numbers[at]) for at in places] == [3, 7, 2, 4, 6, 8, 1, 5][:limit]


def test_no_images() -> None:
    none = np.zeros(0, np.int64)
    assert len(nearest(np.zeros((0, 8), np.float16), none, none, unit(1, 8, 0)[0], 5)[0]) == 0

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lapclip.find.index import Entry, Index
from lapclip.find.nearest import BLOCK, highest, similarities


def unit(count: int, width: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_fifty_thousand_pictures_against_plain_numpy(tmp_path: Path) -> None:
    count, width = 50_000, 128
    assert count > 2 * BLOCK
    vectors = unit(count, width, 0)
    index = Index(tmp_path / "index")
    index.open()
    index.begin("synthetic", width)
    rows = index.append(vectors)
    index.put(Entry(0, f"{row}.jpg", 1, 1, f"{row:x}", None, 1, 1, row) for row in rows)
    table, mapped = index.snapshot()
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(table.numbers, np.arange(1, count + 1))
    for question in unit(3, width, 1):
        scores = similarities(mapped, question)
        exact = vectors.astype(np.float16).astype(np.float64) @ question.astype(np.float64)
        assert np.abs(scores - exact).max() < 1e-6
        for limit in (1, 20, 1000):
            assert np.array_equal(highest(scores, table.numbers, limit), np.argsort(-scores, kind="stable")[:limit])


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 8, 20])
def test_equal_scores_come_in_the_order_of_their_numbers(limit: int) -> None:
    scores = np.array([0.5, 0.9, 0.5, 0.1, 0.5, 0.9, 0.5, 0.1], np.float32)
    numbers = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    assert [int(numbers[at]) for at in highest(scores, numbers, limit)] == [3, 7, 2, 4, 6, 8, 1, 5][:limit]


def test_no_pictures() -> None:
    assert len(highest(similarities(np.zeros((0, 8), np.float16), unit(1, 8, 0)[0]), np.zeros(0, int), 5)) == 0

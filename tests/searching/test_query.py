from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from lapclip.errors import SearchError
from lapclip.searching.index import Entry, Index
from lapclip.searching.query import (
    BOUND,
    SHARE,
    Query,
    excluded,
    nearest,
    parse,
    parse_since,
    rough_scores,
    vector_of,
)


@pytest.mark.parametrize(
    ("query", "wanted", "unwanted"),
    [
        ("beach", "beach", ()),
        ("beach -people", "beach", ("people",)),
        ('a  street -"parked cars" -rain at night', "a street at night", ("parked cars", "rain")),
        ("a t-shirt - blue", "a t-shirt - blue", ()),
        ("-people", "", ("people",)),
        ("1990--2000 -- x", "1990--2000 -- x", ()),
    ],
)
def test_questions_in_their_parts(query: str, wanted: str, unwanted: tuple[str, ...]) -> None:
    assert parse(query) == Query(wanted, unwanted)


@pytest.mark.parametrize("query", ["", "  \n"])
def test_an_empty_question(query: str) -> None:
    with pytest.raises(SearchError, match="nothing to look for"):
        parse(query)


def test_what_is_not_wanted_is_taken_away() -> None:
    known = {"beach": [1.0, 0.0, 0.0], "people": [0.6, 0.8, 0.0], "cars": [0.6, 0.0, 0.8]}
    encode = lambda texts: np.array([known[text] for text in texts], np.float32)  # noqa: E731
    assert np.array_equal(vector_of(Query("beach", ()), encode), np.array([1, 0, 0], np.float32))
    without = vector_of(Query("beach", ("people", "cars")), encode)
    expected = np.array([1 - SHARE * 0.6, -SHARE * 0.4, -SHARE * 0.4])
    assert np.allclose(without, expected / np.linalg.norm(expected), atol=1e-6)
    assert np.allclose(vector_of(Query("", ("people",)), encode), [-0.6, -0.8, 0], atol=1e-6)


def test_dates_and_ages() -> None:
    assert parse_since("2024-05-01") == datetime(2024, 5, 1).timestamp()
    assert parse_since("2024-05") == datetime(2024, 5, 1).timestamp()
    assert parse_since("2024") == datetime(2024, 1, 1).timestamp()
    assert parse_since("30d", now=1e9) == 1e9 - 30 * 86_400
    assert parse_since("2W", now=1e9) == 1e9 - 14 * 86_400
    for text in ("yesterday", "2024-13-01", "d", "", "-3d"):
        with pytest.raises(SearchError, match="no date and no age"):
            parse_since(text)


@pytest.mark.parametrize(
    ("path", "glob", "out"),
    [
        ("screenshots/a.png", "screenshots", True),
        ("2024/Screenshots/a.png", "screenshots", True),
        ("screenshots/a.png", "screenshots/*", True),
        ("2024/a.PNG", "*.png", True),
        ("2024/a.jpg", "2024/a.jpg", True),
        ("2024/a.jpg", "2023", False),
        ("my screenshots/a.png", "screenshots", False),
        ("2024\\may\\a.jpg", "2024/may/", True),
    ],
)
def test_paths_that_are_left_out(path: str, glob: str, out: bool) -> None:
    assert excluded(path, [glob]) is out


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
        "lapclip.searching.query.rough_scores",
        lambda vectors, question: exact.astype(np.float32) + noise,
    )
    places, _ = nearest(vectors, np.arange(2000), np.arange(2000), question, 10)
    assert places.tolist() == np.argsort(-exact)[:10].tolist()


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 8, 20])
def test_equal_scores_come_in_the_order_of_their_numbers(limit: int) -> None:
    vectors = np.array([0.5, 0.9, 0.5, 0.1, 0.5, 0.9, 0.5, 0.1], np.float16)[:, None] * np.ones(
        (1, 4), np.float16
    )
    numbers = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    places, _ = nearest(vectors, np.arange(8), numbers, np.full(4, 0.5), limit)
    assert [int(numbers[at]) for at in places] == [3, 7, 2, 4, 6, 8, 1, 5][:limit]


def test_no_images() -> None:
    none = np.zeros(0, np.int64)
    assert len(nearest(np.zeros((0, 8), np.float16), none, none, unit(1, 8, 0)[0], 5)[0]) == 0

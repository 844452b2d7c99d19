from __future__ import annotations

from datetime import datetime

import numpy as np
import pytest

from lapclip.errors import SearchError
from lapclip.searching.query import SHARE, Query, excluded, parse, parse_since, vector_of


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

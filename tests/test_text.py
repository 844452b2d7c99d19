"""Numbers, times and foreign text as people read them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lapclip import text
from lapclip.text import (
    duration,
    duration_range,
    one_line,
    part_name,
    printable,
    short_duration,
    significant,
    size,
)

NOT_NUMBERS = (None, True, "3", float("nan"), float("inf"), 10**400)


def test_numbers_as_a_person_reads_them() -> None:
    assert [significant(value) for value in (0.12345, 12345.6, 1e-9, 0)] == [
        "0.123",
        "12,346",
        "1.00e-09",
        "0",
    ]
    assert [text.percent(value) for value in (0.1234, 1)] == ["12.3%", "100.0%"]
    assert text.percent(0.1234, 0) == "12%"
    assert text.count(1234567.0) == "1,234,567"
    assert [text.counted(value, "step") for value in (0, 1, 1200, 0.5)] == [
        "0 steps",
        "1 step",
        "1,200 steps",
        "0.5 steps",
    ]
    assert [text.parameters(value) for value in (900, 1.3e6, 1.04e9)] == ["900", "1.3 M", "1.0 B"]
    assert [size(value) for value in (2.4e5, 7e8, 1.5e9, 2.5e10)] == [
        "240 kB",
        "700 MB",
        "1.50 GB",
        "25.0 GB",
    ]
    assert [text.milliseconds(value) for value in (1.234, 2500)] == ["1.23 ms", "2.5 s"]
    assert [text.times(ratio) for ratio in (1.04, 1.43)] == ["a tie", "1.4 times"]
    assert [text.interval(ends) for ends in ([0.1, 0.25], None, [0.1, None])] == [
        "10.0% to 25.0%",
        "",
        "",
    ]


@pytest.mark.parametrize(
    "shown",
    [
        duration,
        short_duration,
        significant,
        size,
        text.count,
        text.parameters,
        text.percent,
        text.milliseconds,
        text.moment,
    ],
)
def test_what_is_no_number_is_a_dash(shown) -> None:
    assert [shown(value) for value in NOT_NUMBERS] == ["-"] * len(NOT_NUMBERS)


def test_times_as_a_person_says_them() -> None:
    seconds = (0, 0.4, 9.96, 59, 59.6, 252, 7500, 276_000)
    assert [duration(value) for value in seconds] == [
        "0 s", "0.4 s", "10 s", "59 s", "1 min", "4 min 12 s", "2 h 5 min", "3 d 4 h",
    ]  # fmt: skip
    assert [short_duration(value) for value in (45, 252, 7500, 200_000)] == [
        "45 s",
        "4 min",
        "2 h",
        "2 d",
    ]


def test_a_range_is_no_finer_than_it_is_sure() -> None:
    assert duration_range(126, 150) == "2.1 to 2.5 min"
    assert duration_range(2400, 3900) == "40 to 65 min"
    assert duration_range(41, 60) == "41 to 60 s"
    assert duration_range(100.1, 100.2) == ""


def test_parts_of_the_model_have_names() -> None:
    assert [part_name(name) for name in ("image.3", "text.head", "logit_scale", "other.3")] == [
        "image block 4", "text head", "logit_scale", "other.3",
    ]  # fmt: skip


def test_what_would_steer_a_terminal_is_taken_out() -> None:
    shown = one_line("a\x1b[2Jb\nc\x07")
    assert shown.isprintable()
    assert "\x1b" not in shown
    assert "b c" in shown
    assert printable("ä\n\x1b\u202e") == r"ä\n\x1b\u202e"
    assert one_line("  two \t words\u2028 ") == "two words"


def test_paths_are_short_where_they_lie_below_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert text.path_from_here(Path.cwd() / "runs" / "first") == str(Path("runs") / "first")
    assert text.path_from_here(Path.cwd().parent) == str(Path.cwd().parent)


def test_a_page_shows_joined_emoji_and_wide_spaces_but_no_controls() -> None:
    farmer = "\U0001f469\u200d\U0001f33e\u3000"
    assert text.without_controls(f"{farmer}\x1b[2J\x9b\r\n") == f"{farmer}\\x1b[2J\\x9b\\r\n"


def test_json_is_valid_whatever_is_in_it() -> None:
    values = {
        "a": [float("nan"), (1.5, float("-inf"))],
        "b": {"c": float("inf"), "d": "NaN", "e": 10**400},
    }
    assert (
        text.to_json(values)
        == f'{{"a": [null, [1.5, null]], "b": {{"c": null, "d": "NaN", "e": {10**400}}}}}'
    )
    assert (
        text.to_json({"a": np.array([1.0, np.nan]), "b": np.float32(0.5)})
        == '{"a": [1.0, null], "b": 0.5}'
    )
    assert text.to_json({"a": 1, "b": [2]}, compact=True) == '{"a":1,"b":[2]}'


def test_all_json_that_others_read_is_written_by_one_function() -> None:
    package = Path(text.__file__).parent
    for folder in ("cli", "watch", "report", "searching/web", "serving/dialects"):
        for path in (package / folder).rglob("*.py"):
            assert not re.search(r"(print|Response|\.write)\(json\.dumps?\(", path.read_text()), (
                path
            )

"""Numbers, times and foreign text as people read them."""

from __future__ import annotations

from lapclip.text import duration, duration_range, one_line, part_name, short_duration, significant, size


def test_numbers_as_a_person_reads_them() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 252, 7500, 276_000, None)] == [
        "0.4 s", "59 s", "4 min 12 s", "2 h 5 min", "3 d 4 h", "-",
    ]  # fmt: skip
    assert [short_duration(seconds) for seconds in (45, 252, 7500)] == ["45 s", "4 min", "2 h"]
    assert [significant(value) for value in (0.12345, 12345.6, 1e-9, float("nan"))] == [
        "0.123",
        "12,346",
        "1.00e-09",
        "-",
    ]
    assert [size(value) for value in (7e8, 1.5e9, 2.5e10)] == ["700 MB", "1.50 GB", "25.0 GB"]
    assert part_name("image.3") == "image block 4"
    assert part_name("text.head") == "text head"


def test_a_range_is_no_finer_than_it_is_sure() -> None:
    assert duration_range(126, 150) == "2.1 to 2.5 min"
    assert duration_range(2400, 3900) == "40 to 65 min"
    assert duration_range(41, 60) == "41 to 60 s"
    assert duration_range(100.1, 100.2) == ""


def test_what_would_steer_a_terminal_is_taken_out() -> None:
    text = one_line("a\x1b[2Jb\nc\x07")
    assert text.isprintable()
    assert "\x1b" not in text
    assert "b c" in text

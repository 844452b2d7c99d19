from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from lapclip.errors import RunError
from lapclip.runs.events import LONGEST_LINE, VERSION, Event, EventLog, Stopped, read_events
from lapclip.runs.follow import Tail

DEEP = b'{"type":"step","step":9,"loss":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def stopped(step: int) -> Stopped:
    return Stopped(step=step, reason="a test")


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read_events(path)]


def test_events_come_back_with_version_type_and_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(stopped(3))
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["v"], event["type"], event["step"], event["reason"]) == (
        VERSION,
        "stopped",
        3,
        "a test",
    )
    assert event["time"] > 1.7e9


def test_listeners_hear_each_event(tmp_path: Path) -> None:
    heard: list[Event] = []
    EventLog(tmp_path / "events.jsonl", heard.append).append(stopped(1))
    assert heard == [stopped(1)]


def test_a_half_written_last_line_is_passed_over_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).append(stopped(1))
    with open(path, "a") as file:
        file.write('{"v":1,"type":"stopped","st')
    assert steps(path) == [1]
    EventLog(path).append(stopped(2))
    assert steps(path) == [1, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("half", ["x" * 10_000, ""])
def test_a_file_without_a_whole_line_starts_anew(tmp_path: Path, half: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(half)
    EventLog(path).append(stopped(2))
    assert steps(path) == [2]


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"type":"step","step":1}\n\xff\xfe\n[1]\nnull\n'
        + DEEP
        + b'\n{"type":[]}\n{"type":"step","step":2}\n'
    )
    assert steps(path) == [1, 2]
    assert [event["step"] for event in Tail(path).read()] == [1, 2]


def test_a_line_longer_than_any_event_is_passed_over_and_never_held(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    one, two = b'{"type":"step","step":1}\n', b'{"type":"step","step":2}\n'
    path.write_bytes(one)
    with open(path, "r+b") as file:  # zeros that take no room on the disk
        file.truncate(50 * LONGEST_LINE)
    tail = Tail(path)
    tracemalloc.start()
    try:
        assert steps(path) == [event["step"] for event in tail.read()] == [1]
        assert tracemalloc.get_traced_memory()[1] < 6 * LONGEST_LINE
    finally:
        tracemalloc.stop()
    with open(path, "ab") as file:
        file.write(b"\n" + two)
    assert steps(path) == [1, 2]
    assert [event["step"] for event in tail.read()] == [2]


def test_events_are_not_appended_through_a_link(tmp_path: Path) -> None:
    path, precious = tmp_path / "events.jsonl", tmp_path / "precious"
    precious.write_text("whole\nhalf a line")
    path.hardlink_to(precious)
    with pytest.raises(RunError, match="it is a link"):
        EventLog(path)
    path.unlink()
    try:
        path.symlink_to(precious)
    except OSError:
        pytest.skip("Windows lets few users make links")
    with pytest.raises(RunError, match="it is a link"):
        EventLog(path)
    assert precious.read_text() == "whole\nhalf a line"


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == []


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full, as Linux has"
)
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(RunError, match="No space left on device"):
        log.append(stopped(1))
    log.close()

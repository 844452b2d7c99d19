from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from lapclip.runs import follow
from lapclip.runs.folder import Run
from lapclip.runs.follow import FollowedRun, Tail


def line(kind: str, **fields: object) -> str:
    return json.dumps({"v": 1, "type": kind, "time": 0.0, **fields}, separators=(",", ":")) + "\n"


def steps(first: int, last: int) -> str:
    return "".join(line("step", step=step, loss=1.0) for step in range(first, last + 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_a_file_is_followed_from_its_first_whole_line_and_damage_is_passed_over(path: Path) -> None:
    found = Tail(path)
    whole = steps(1, 1)
    for content, expected in (
        (None, []),
        (whole[:20], []),
        (whole[20:] + 'no json\n[1]\n{"type": 3}\n' + steps(2, 2)[:-1], [1]),
        ("\n", [2]),
        (steps(3, 4), [3, 4]),
        ("", []),
    ):
        if content is not None:
            with open(path, "a") as file:
                file.write(content)
        assert [event["step"] for event in found.read()] == expected


def test_a_file_that_was_cut_or_replaced_is_read_anew(path: Path) -> None:
    found = Tail(path)
    path.write_text(steps(1, 9))
    found.read()
    assert not found.restarted
    path.write_text(steps(1, 2))
    assert [event["step"] for event in found.read()] == [1, 2]
    assert found.restarted
    other = path.with_name("other")
    other.write_text(steps(5, 30))
    other.replace(path)
    assert [event["step"] for event in found.read()] == list(range(5, 31))
    assert found.restarted
    path.unlink()
    assert found.read() == []


def test_of_a_large_file_steps_are_sampled_and_nothing_else_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "WHOLE_FILE", 20_000)
    monkeypatch.setattr(follow, "SAMPLED_STEPS", 50)
    monkeypatch.setattr(follow, "WHOLE_ENDS", 1000)
    text = line("started", steps=5000)
    for step in range(1, 5001):
        text += steps(step, step)
        text += line("evaluation", step=step, evaluation={}) if step % 500 == 0 else ""
        text += line("checkpoint", step=step) if step % 300 == 0 else ""
    path.write_text(text + '{"v":1,"type":"st')
    found = Tail(path)
    events = found.read()
    kinds = [event["type"] for event in events]
    assert kinds[0] == "started"
    assert kinds.count("evaluation") == 10
    assert kinds.count("checkpoint") == 16
    numbers = [event["step"] for event in events if event["type"] == "step"]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (1, 5000)
    assert 50 <= len(numbers) < 1000
    assert max(after - before for before, after in itertools.pairwise(numbers)) < 500
    with open(path, "a") as file:
        file.write('ep","time":0.0,"step":5001}\n')
    assert [event["step"] for event in found.read()] == [5001]


def test_a_block_without_a_line_break_is_passed_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a power cut may leave it."""
    for name, value in (
        ("WHOLE_FILE", 2000),
        ("SAMPLED_STEPS", 20),
        ("WHOLE_ENDS", 100),
        ("LONGEST_LINE", 1000),
    ):
        monkeypatch.setattr(follow, name, value)
    path.write_bytes(steps(1, 50).encode() + b"\0" * 5000 + b"\n" + steps(51, 100).encode())
    numbers = [event["step"] for event in Tail(path).read()]
    assert (numbers[0], numbers[-1]) == (1, 100)


def write(path: Path, *events: dict) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps({"v": 1, **event}) + "\n" for event in events)


def step(number: int, time: float) -> dict:
    phases = {"forward": 0.1} if number <= 10 or number % 5 == 0 else None
    return {
        "type": "step",
        "time": time,
        "step": number,
        "epoch": 1,
        "loss": 1.0,
        "seconds": phases,
    }


def test_what_is_new_comes_back_and_the_summary_follows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    found = FollowedRun(Run(tmp_path))
    assert found.refresh() == []
    write(path, {"type": "started", "time": 0.0, "steps": 10}, step(1, 1.0), step(2, 2.0))
    assert [event["type"] for event in found.refresh()] == ["started", "step", "step"]
    assert (found.summary.step, found.summary.total_steps) == (2, 10)
    write(path, step(3, 3.0))
    assert [event["step"] for event in found.refresh()] == [3]
    assert found.summary.step == 3
    assert found.refresh() == []
    path.write_text("")
    found.refresh()
    assert found.summary.step == 0


def test_a_long_watch_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST_STEPS", 40)
    path = tmp_path / "events.jsonl"
    found = FollowedRun(Run(tmp_path))
    for number in range(1, 1001):
        write(path, step(number, float(number)), *([{"type": "evaluation", "time": float(number), "step": number,
              "evaluation": {}}] if number % 100 == 0 else []))  # fmt: skip
        write(
            path,
            {
                "type": "ranks",
                "time": float(number),
                "step": number,
                "hosts": ["a", "b"],
                "waited": [0.1, 0.2],
            },
        )
        found.refresh()
    kept = [event["step"] for event in found.events if event["type"] == "step"]
    assert len(kept) <= 41
    assert kept[-1] == 1000
    assert len(found.summary.evaluations) == 10
    assert len(found.summary.ranks) <= 41
    assert found.summary.ranks[-1]["step"] == 1000
    assert found.summary.steps[-1]["gap"] == pytest.approx(
        1.0
    )  # of one step, however many were left out

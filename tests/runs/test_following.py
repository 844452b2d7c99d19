from __future__ import annotations

import json
from pathlib import Path

import pytest

from lapclip.runs import follow as following
from lapclip.runs.follow import Following
from lapclip.runs.summary import summarise


def write(path: Path, *events: dict) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps({"v": 1, **event}) + "\n" for event in events)


def step(number: int, time: float) -> dict:
    phases = {"forward": 0.1} if number <= 10 or number % 5 == 0 else None
    return {"type": "step", "time": time, "step": number, "epoch": 1, "loss": 1.0, "seconds": phases}


def test_what_is_new_comes_back_and_the_summary_follows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    found = Following(path)
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
    monkeypatch.setattr(following, "MOST_STEPS", 40)
    path = tmp_path / "events.jsonl"
    found = Following(path)
    for number in range(1, 1001):
        write(path, step(number, float(number)), *([{"type": "evaluation", "time": float(number), "step": number,
              "evaluation": {}}] if number % 100 == 0 else []))  # fmt: skip
        found.refresh()
    kept = [event["step"] for event in found.events if event["type"] == "step"]
    assert len(kept) <= 41
    assert kept[-1] == 1000
    assert len(found.summary.evaluations) == 10
    assert found.summary.steps[-1]["gap"] == pytest.approx(1.0)  # of one step, however many were left out


def test_a_machine_that_slept_is_a_pause_and_no_slowness() -> None:
    events = [{"type": "started", "time": 0.0, "steps": 100}]
    events += [step(number, float(number)) for number in range(1, 21)]
    events += [step(number, 3600.0 + number) for number in range(21, 31)]
    found = summarise(events)
    assert found.pauses == [(20.0, 3621.0)]
    assert found.elapsed == pytest.approx(29.0)
    assert found.remaining_seconds == pytest.approx(70.0)


def test_a_long_evaluation_is_no_pause() -> None:
    events = [{"type": "started", "time": 0.0, "steps": 100}]
    events += [step(number, float(number)) for number in range(1, 21)]
    events += [{"type": "evaluation", "time": 220.0, "step": 20, "evaluation": {}, "seconds": 199.0}]
    assert summarise(events).pauses == []


def test_a_clock_that_is_set_back_costs_no_time() -> None:
    events = [{"type": "started", "time": 1000.0, "steps": 9}, step(1, 1001.0), step(2, 500.0), step(3, 501.0)]
    assert summarise(events).elapsed == pytest.approx(2.0)


def test_a_polite_pause_is_no_work() -> None:
    events = [{"type": "started", "time": 0.0, "steps": 1000, "config": {"train": {"batch_size": 10}}}]
    events += [step(number, float(number)) for number in range(1, 30)]
    events += [{"type": "sensors", "time": 29.0, "step": 29, "joules": {"cpu": 290.0}}]
    events += [{"type": "paused", "time": 29.5, "step": 29, "reason": "on battery"}]
    events += [{"type": "went_on", "time": 3629.5, "step": 29, "seconds": 3600.0}]
    events += [step(number, 3600.0 + number) for number in range(30, 35)]
    events += [{"type": "sensors", "time": 3635.0, "step": 34, "joules": {"cpu": 9000.0}}]
    events += [{"type": "sensors", "time": 3636.0, "step": 34, "joules": {"cpu": 9010.0}}]
    found = summarise(events)
    assert found.pauses == [(29.5, 3629.5)]
    assert found.elapsed == pytest.approx(36.0)
    assert found.pairs_per_second == pytest.approx(10.0, rel=0.1)
    assert found.joules().y == [290.0, 290.0, 300.0]

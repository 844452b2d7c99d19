from __future__ import annotations

import json
from pathlib import Path

import pytest

from lapclip.runs import follow
from lapclip.runs.folder import Run
from lapclip.runs.follow import FollowedRun


def write(path: Path, *events: dict) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps({"v": 1, **event}) + "\n" for event in events)


def step(number: int, time: float) -> dict:
    phases = {"forward": 0.1} if number <= 10 or number % 5 == 0 else None
    return {"type": "step", "time": time, "step": number, "epoch": 1, "loss": 1.0, "seconds": phases}


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
        found.refresh()
    kept = [event["step"] for event in found.events if event["type"] == "step"]
    assert len(kept) <= 41
    assert kept[-1] == 1000
    assert len(found.summary.evaluations) == 10
    assert found.summary.steps[-1]["gap"] == pytest.approx(1.0)  # of one step, however many were left out

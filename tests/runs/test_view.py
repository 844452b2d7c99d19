"""How a run stands: one view, whoever shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import filelock
import pytest

from lapclip.runs.folder import Run
from lapclip.runs.follow import FollowedRun, RunStatus
from lapclip.runs.summary import summarise
from lapclip.runs.view import RunView, view_of

from ..conftest import lapclip
from ..watch.recorded import finished, trained, write


def seen(run: Path) -> RunView:
    followed = FollowedRun(Run(run))
    followed.refresh()
    return followed.view


def test_all_who_show_a_run_say_the_same_of_it(here: Path) -> None:
    folder = write(here, "mine", trained(170))
    view, whole = seen(folder), view_of(Run(folder))
    (row,) = json.loads(lapclip("runs", "--json").stdout)["runs"]
    (watched,) = json.loads(lapclip("watch", "mine", "--json").stdout)["runs"]
    for name, value in {
        "state": "died",
        "step": 170,
        "steps": 200,
        "best": pytest.approx(0.6),
    }.items():
        assert row[name] == value
        assert watched[name] == value
    assert (view.state, view.summary.step, view.best_recall) == ("died", 170, pytest.approx(0.6))
    assert (whole.state, whole.loss, whole.watts) == (view.state, view.loss, view.watts)
    assert view.epoch == 9
    assert watched["accuracy"] == pytest.approx(view.accuracy.y[-1])


def test_a_running_run_is_starting_until_its_first_step_and_may_be_paused(here: Path) -> None:
    events = trained(30)
    paused = {"type": "paused", "time": events[-1]["time"], "step": 30, "reason": "on battery"}
    folders = [
        write(here, "a", events[:1]),
        write(here, "b", events),
        write(here, "c", [*events, paused]),
    ]
    found = []
    for folder in folders:
        with filelock.FileLock(folder / "lock"):
            view = seen(folder)
        found.append((view.state, view.status, view.pause_reason, view.time_left is not None))
    assert found == [
        ("running", "starting", None, False),
        ("running", "running", None, True),
        ("running", "paused", "on battery", True),
    ]
    assert seen(write(here, "d", finished())).time_left is None


def test_a_run_that_ends_while_it_is_read_has_not_died(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = finished()
    folder = write(here, "mine", events[:-1])
    status = RunStatus(Run(folder))
    ask = Run.state_after

    def end_meanwhile(run: Run, last_state: Any) -> str:
        monkeypatch.setattr(Run, "state_after", ask)
        with open(folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"v": 1, **events[-1]}) + "\n")
        return ask(run, last_state)

    monkeypatch.setattr(Run, "state_after", end_meanwhile)
    status.refresh()
    assert status.state == "finished"


def test_the_logit_bias_is_there_where_the_loss_has_one() -> None:
    steps: list[dict[str, Any]] = [
        {"type": "step", "step": at, "time": float(at), "loss": 1.0} for at in range(1, 5)
    ]
    without = RunView("mine", "died", summarise(steps))
    assert without.metrics == {}
    assert "logit_bias" not in without.to_dict(lambda _: [])["curves"]
    with_bias = RunView(
        "mine", "died", summarise([{**event, "logit_bias": -10.0} for event in steps])
    )
    assert list(with_bias.metrics) == ["logit_bias"]
    assert with_bias.step_curve("logit_bias").y == [-10.0] * 4
    assert with_bias.to_dict(lambda _: [])["curves"]["logit_bias"]["value"][-1] == -10.0


def test_machines_are_there_where_several_train() -> None:
    steps: list[dict[str, Any]] = [
        {"type": "step", "step": at, "time": float(at), "loss": 1.0} for at in range(1, 5)
    ]
    ranks = {
        "type": "ranks",
        "step": 4,
        "time": 4.0,
        "hosts": ["a", "b"],
        "rows": [96, 32],
        "waited": [0.1, 0.5],
    }
    alone, both = (
        RunView("mine", "died", summarise(events)) for events in (steps, [*steps, ranks])
    )
    assert alone.to_dict(lambda _: [])["machines"] is None
    told = both.to_dict(lambda _: [])["machines"]
    assert [(rank["name"], rank["share"], rank["waited"]) for rank in told["ranks"]] == [
        ("a", 0.75, 0.1),
        ("b", 0.25, 0.5),
    ]
    assert "b waits for a" in told["waiting"]

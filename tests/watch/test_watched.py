"""Following runs that come, go, grow and are deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import filelock
import pytest

from lapclip.errors import RunError
from lapclip.watch import watched_runs as module
from lapclip.watch.watched_runs import Watched, Watching

from .recorded import append, finished, started, step, trained, write


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for states and search for runs every time."""
    monkeypatch.setattr(module, "STATE_EVERY", 0.0)
    monkeypatch.setattr(module, "SEARCH_EVERY", 0.0)


def test_a_run_is_followed_from_before_it_is_there_until_it_is_deleted(here: Path) -> None:
    watching = Watching(["mine"], wait=True)
    watching.refresh()
    assert watching.looks[0].state == "waiting"
    assert not (here / "runs").exists()  # looking leaves nothing behind
    run = write(here, "mine", [])
    with filelock.FileLock(run / "lock"):
        watching.refresh()
        assert watching.looks[0].state == "starting"
        append(run, [started(0.0), step(1, 1.0), step(2, 2.0)])
        with open(run / "events.jsonl", "a") as file:
            file.write('{"v":1,"type":"step","step":3,')
            file.flush()
            watching.refresh()
            assert (watching.looks[0].state, watching.looks[0].summary.step) == ("running", 2)
            file.write('"time":3.0,"loss":1.5}\n')
        watching.refresh()
        assert watching.looks[0].summary.step == 3
    watching.refresh()
    assert watching.looks[0].state == "died"
    shutil.rmtree(run)
    watching.refresh()
    assert watching.looks[0].state == "gone"
    assert not run.exists()
    assert watching.looks[0].summary.step == 3
    write(here, "mine", trained(10))
    watching.refresh()
    assert (watching.looks[0].state, watching.looks[0].summary.step) == ("died", 10)


def test_without_names_the_running_runs_are_watched_and_new_ones_appear(here: Path) -> None:
    write(here, "old", finished())
    busy = write(here, "busy", trained(20))
    write(here, "newest", finished())
    with filelock.FileLock(busy / "lock"):
        watching = Watching([], wait=True)
        assert [run.name for run in watching.runs] == ["busy"]
        write(here, "another", trained(5))
        watching.refresh()
        assert "another" in [run.name for run in watching.runs]
        assert watching.focused is watching.runs[0]  # what someone looks at stays where it is


def test_without_names_and_nothing_running_the_newest_is_watched(here: Path) -> None:
    write(here, "old", finished())
    write(here, "newest", finished())
    watching = Watching([], wait=True)
    assert [run.name for run in watching.runs] == ["newest"]


def test_no_runs_at_all_are_an_error_for_scripts_and_a_wait_for_people(here: Path) -> None:
    with pytest.raises(RunError, match="There are no runs"):
        Watching([], wait=False)
    with pytest.raises(RunError, match="No run called mine"):
        Watching(["mine"], wait=False)
    watching = Watching([], wait=True)
    watching.refresh()
    assert (watching.runs, watching.focused) == ([], None)
    write(here, "mine", trained(3))
    watching.refresh()
    assert [run.name for run in watching.runs] == ["mine"]


def test_the_focus_goes_round(here: Path) -> None:
    for name in ("a", "b", "c"):
        write(here, name, trained(3))
    watching = Watching(["a", "b", "c"], wait=False)
    seen = []
    for by in (1, 1, 1, -1):
        watching.move(by)
        seen.append(watching.runs[watching.focus].name)
    assert seen == ["b", "c", "a", "c"]


def test_the_state_of_a_long_run_is_told_without_reading_it_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(here, "mine", finished())
    watched = Watched(run)
    watched.refresh()
    assert watched.look.state == "finished"
    monkeypatch.setattr("lapclip.runs.folder.read_events", None)  # would not do if it were called
    watched.refresh()
    assert watched.look.state == "finished"


def test_nothing_new_costs_no_new_look(here: Path) -> None:
    watched = Watched(write(here, "mine", finished()))
    watched.refresh()
    before = watched.look
    assert watched.refresh() == []
    assert watched.look is before


def test_runs_that_compete_are_told_of(here: Path) -> None:
    runs = [write(here, name, trained(100)) for name in ("mine", "other")]
    with filelock.FileLock(runs[0] / "lock"):
        alone = Watching(["mine"], wait=False)
        alone.refresh()
        with filelock.FileLock(runs[1] / "lock"):
            watching = Watching(["mine"], wait=False)
            watching.refresh()
    assert "competing-runs" not in [finding.id for finding in alone.looks[0].findings]
    assert "competing-runs" in [finding.id for finding in watching.looks[0].findings]

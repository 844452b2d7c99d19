"""Following runs that come, go, grow and are deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import filelock
import pytest

from lapclip.errors import RunError
from lapclip.runs import follow
from lapclip.runs.folder import Run
from lapclip.runs.follow import FollowedRun
from lapclip.watch.terminal import WatchedRuns

from .recorded import append, finished, started, step, trained, write


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for states every time."""
    monkeypatch.setattr(follow, "STATE_EVERY", 0.0)


def test_a_run_is_followed_from_its_start_until_it_is_deleted(here: Path) -> None:
    run = write(here, "mine", [])
    watching = WatchedRuns(["mine"])
    with filelock.FileLock(run / "lock"):
        watching.refresh()
        assert watching.views[0].status == "starting"
        append(run, [started(0.0), step(1, 1.0), step(2, 2.0)])
        with open(run / "events.jsonl", "a") as file:
            file.write('{"v":1,"type":"step","step":3,')
            file.flush()
            watching.refresh()
            assert (watching.views[0].status, watching.views[0].summary.step) == ("running", 2)
            file.write('"time":3.0,"loss":1.5}\n')
        watching.refresh()
        assert watching.views[0].summary.step == 3
    watching.refresh()
    assert watching.views[0].status == "died"
    shutil.rmtree(run)
    watching.refresh()
    assert watching.views[0].status == "gone"
    assert not run.exists()
    assert watching.views[0].summary.step == 3
    write(here, "mine", trained(10))
    watching.refresh()
    assert (watching.views[0].status, watching.views[0].summary.step) == ("died", 10)


def test_without_names_the_running_runs_are_watched(here: Path) -> None:
    write(here, "old", finished())
    busy = write(here, "busy", trained(20))
    write(here, "newest", finished())
    with filelock.FileLock(busy / "lock"):
        assert [run.name for run in WatchedRuns([]).runs] == ["busy"]


def test_without_names_and_nothing_running_the_newest_is_watched(here: Path) -> None:
    write(here, "old", finished())
    write(here, "newest", finished())
    watching = WatchedRuns([])
    assert [run.name for run in watching.runs] == ["newest"]


def test_runs_that_are_not_there_are_an_error(here: Path) -> None:
    with pytest.raises(RunError, match="There are no runs"):
        WatchedRuns([])
    with pytest.raises(RunError, match="No run called mine"):
        WatchedRuns(["mine"])
    assert not (here / "runs").exists()  # looking leaves nothing behind


def test_the_focus_goes_round(here: Path) -> None:
    for name in ("a", "b", "c"):
        write(here, name, trained(3))
    watching = WatchedRuns(["a", "b", "c"])
    seen = []
    for by in (1, 1, 1, -1):
        watching.move(by)
        seen.append(watching.runs[watching.focus].name)
    assert seen == ["b", "c", "a", "c"]


def test_the_state_of_a_long_run_is_told_without_reading_it_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(here, "mine", finished())
    watched = FollowedRun(Run(run))
    watched.refresh()
    assert watched.view.state == "finished"
    monkeypatch.setattr("lapclip.runs.folder.read_events", None)  # would not do if it were called
    watched.refresh()
    assert watched.view.state == "finished"


def test_nothing_new_costs_no_new_look(here: Path) -> None:
    watched = FollowedRun(Run(write(here, "mine", finished())))
    watched.refresh()
    before = watched.view
    assert watched.refresh() == []
    assert watched.view is before


def test_runs_that_compete_are_told_of(here: Path) -> None:
    runs = [write(here, name, trained(100)) for name in ("mine", "other")]
    with filelock.FileLock(runs[0] / "lock"):
        alone = WatchedRuns(["mine"])
        alone.refresh()
        found_alone = [finding.id for finding in alone.views[0].findings]
        with filelock.FileLock(runs[1] / "lock"):
            watching = WatchedRuns(["mine"])
            watching.refresh()
            found_together = [finding.id for finding in watching.views[0].findings]
    assert "competing-runs" not in found_alone
    assert "competing-runs" in found_together

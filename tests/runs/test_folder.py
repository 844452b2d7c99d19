from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lapclip.errors import RunBusy, RunError
from lapclip.runs.events import EventLog, Failed, Stopped
from lapclip.runs.folder import Run, TrainRequest, all_runs, create_run, find_run

from ..conftest import lapclip
from ..small_runs import prepared_run

SETTINGS = {"run": {"format": 1}}
REQUEST = TrainRequest("seed")


def test_runs_are_named_after_their_recipe_and_numbered(here: Path) -> None:
    assert [create_run(None, "seed", REQUEST).name for _ in range(3)] == [
        "seed",
        "seed-2",
        "seed-3",
    ]
    assert not list(here.glob("runs/.*"))


def test_a_run_folder_that_exists_is_refused_and_left_alone(here: Path) -> None:
    prepared_run("mine", SETTINGS)
    with pytest.raises(RunError, match=r"mine exists.*\n.*lapclip resume mine"):
        create_run("mine", "seed", REQUEST)
    assert Run(Path("runs/mine")).read_settings() == SETTINGS


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "a b", "-x"])
def test_names_that_are_not_folders_are_refused(here: Path, name: str) -> None:
    with pytest.raises(RunError, match="cannot name a run"):
        create_run(name, "seed", REQUEST)


def test_runs_are_found_by_name_by_path_or_as_the_newest(here: Path) -> None:
    prepared_run("older", SETTINGS)
    time.sleep(0.01)
    prepared_run("newer", SETTINGS)
    assert find_run(None).name == "newer"
    assert find_run("older").name == find_run("runs/older").name == "older"
    assert [run.name for run in all_runs()] == ["older", "newer"]
    with pytest.raises(RunError, match=r"No run called olde in .*runs\. Did you mean older"):
        find_run("olde")


def test_a_folder_that_is_no_run_is_named(here: Path) -> None:
    (here / "photos").mkdir()
    with pytest.raises(RunError, match="photos is not a run"):
        find_run("photos").read_settings()


@pytest.mark.parametrize("text", ["not toml [", "[run]\nformat = 99\n", ""])
def test_a_foreign_run_toml_is_refused(here: Path, text: str) -> None:
    run = prepared_run("mine", SETTINGS)
    run.settings.write_text(text)
    with pytest.raises(RunError, match=r"run\.toml (is not readable|has format)"):
        run.read_settings()


def test_state_follows_the_events(here: Path) -> None:
    run = prepared_run("mine", SETTINGS)
    assert run.state == "died"
    log = EventLog(run.events)
    log.append(Stopped(step=1, reason="asked"))
    assert run.state == "stopped"
    log.append(Failed(step=2, error="no"))
    assert run.state == "failed"
    with run.lock():
        assert run.state == "running"
    assert run.state == "failed"


def test_a_second_process_is_refused_and_the_lock_dies_with_its_owner(here: Path) -> None:
    run = prepared_run("mine", SETTINGS)
    program = (
        "import time; from pathlib import Path; from lapclip.runs.folder import Run\n"
        "with Run(Path('runs/mine')).lock():\n    print('locked', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "locked\n"
    with pytest.raises(RunBusy, match="Another process is working"), run.lock():
        pass
    assert run.state == "running"
    owner.kill()
    owner.wait()
    with run.lock():
        pass
    assert run.state == "died"


def test_a_request_to_stop_is_seen_and_forgotten(here: Path) -> None:
    run = prepared_run("mine", SETTINGS)
    run.ask_to_stop()
    assert run.stop_asked()
    run.clear_stop()
    assert not run.stop_asked()


def test_a_folder_that_cannot_be_written_to_says_what_to_do(here: Path) -> None:
    run = prepared_run("mine", SETTINGS)
    for taken in ("lock", "events.jsonl"):
        (run.path / taken).mkdir()
    with pytest.raises(RunError, match=r"Cannot write to.*mine") as locked, run.lock():
        pass
    with pytest.raises(RunError, match=r"Cannot write to.*events\.jsonl") as logged:
        EventLog(run.events)
    here.joinpath("runs").rename(here / "elsewhere")
    (here / "runs").touch()
    with pytest.raises(RunError, match="Cannot make a run folder") as made:
        create_run("mine", "seed", REQUEST)
    assert all(error.value.hint for error in (locked, logged, made))


@pytest.mark.parametrize("name", ["photos", "tables/captions.csv", "."])
def test_paths_of_data_beside_the_runs_are_relative(here: Path, name: str) -> None:
    source, elsewhere = here / name, str(here.parent / "pictures")
    settings = {
        "run": {"format": 1, "asked": {"data": {"source": str(source)}}},
        "data": {"source": str(source), "pictures": elsewhere},
    }
    run = prepared_run("mine", settings)
    assert str(here) not in run.settings.read_text()
    assert run.read_settings() == settings
    run.record("together", {"machines": 2})
    assert run.read_settings() == {**settings, "together": {"machines": 2}}
    (here / "moved").mkdir()
    (here / "runs").rename(here / "moved" / "runs")
    saved = Run(here / "moved/runs/mine").read_settings()["data"]
    assert (Path(saved["source"]), saved["pictures"]) == (here / "moved" / name, elsewhere)


def linked(link: Path, target: Path) -> None:
    try:
        link.symlink_to(target, target_is_directory=target.is_dir())
    except OSError:
        pytest.skip("Windows lets few users make links")


SYMBOLIC = ["log.txt", "events.jsonl", "lock", "pulse", "checkpoints", "model/config.json"]


@pytest.mark.parametrize(
    ("name", "hard"),
    [(name, False) for name in SYMBOLIC] + [(name, True) for name in SYMBOLIC[:3]],
)
def test_a_run_with_a_link_in_its_folder_is_not_written_to(
    here: Path, name: str, hard: bool
) -> None:
    run = prepared_run("mine", SETTINGS)
    run.model.mkdir()
    precious = here / "precious"
    precious.write_text("half a line")
    if hard:
        (run.path / name).hardlink_to(precious)
    else:
        linked(run.path / name, precious)
    with pytest.raises(RunError) as refused, run.lock():
        pass
    assert name in str(refused.value).replace("\\", "/")
    assert hard or "is a link" in str(refused.value)
    assert run.state == "died"  # asking changes nothing either
    assert precious.read_text() == "half a line"


def test_the_folders_of_runs_may_be_links(here: Path) -> None:
    prepared_run("mine", SETTINGS).path.rename(here / "large-disk")
    linked(here / "runs" / "mine", here / "large-disk")
    with find_run("mine").lock():
        assert find_run("mine").state == "running"


def test_a_request_to_stop_is_not_written_through_a_link(here: Path) -> None:
    run = prepared_run("mine", SETTINGS)
    linked(run.path / "stop", here / "made")
    with pytest.raises(RunError, match="stop is a link"):
        run.ask_to_stop()
    assert not (here / "made").exists()


PIPES = """
import sys
from pathlib import Path
from lapclip.runs.folder import Run
from lapclip.runs.follow import RunStatus
for path in sys.argv[1:]:
    run = Run(Path(path))
    run.never_began, run.last_ending(), run.data_source(), RunStatus(run).refresh()
    print(run.state)
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names there")
def test_a_pipe_in_a_run_is_not_waited_for(here: Path) -> None:
    runs = {
        name: prepared_run(name, SETTINGS)
        for name in ("pulse", "request.json", "log.txt", "events.jsonl")
    }
    for name, run in runs.items():
        os.mkfifo(run.path / name)
    whole = prepared_run("whole", SETTINGS)
    whole.settings.unlink()
    os.mkfifo(whole.settings)
    asked = [sys.executable, "-c", PIPES, *(str(run.path) for run in (*runs.values(), whole))]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["died", "died", "died", "died", "died"], done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["stop"], ["resume"], ["resume", "--background"], ["watch", "--once"], ["watch", "--json"], ["doctor"],
     ["report"], ["eval"], ["clean", "--yes", "--run"]],
)  # fmt: skip
def test_a_folder_that_is_no_run_is_refused_and_left_as_it_was(
    here: Path, arguments: list[str]
) -> None:
    folder = here / "photos"
    folder.mkdir()
    (folder / "a.txt").write_text("mine")
    for name in ("photos", str(folder)):
        done = lapclip(*arguments, name)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 3
    assert [path.name for path in folder.iterdir()] == ["a.txt"]

"""Real processes, really killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lapclip.runs.events import read_events

from ..conftest import SMALL, command, lapclip, set_flags
from ..small_runs import stop_after, train_small

SETTINGS = set_flags(
    *SMALL,
    "train.steps=100",
    "train.checkpoint_every_seconds=0.2",
    "train.evaluate_every_epochs=20",
)


def events(folder: Path) -> list[dict]:
    lines = next(folder.glob("runs/*/events.jsonl")).read_text().splitlines()
    return [json.loads(line) for line in lines]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        command(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(folder: Path, number: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 90
    while time.monotonic() < limit and process.poll() is None:
        found = list(folder.glob("runs/*/events.jsonl"))
        if any(f'"step":{number},"epoch"' in path.read_text() for path in found):
            return
        time.sleep(0.02)
    output, errors = process.communicate(timeout=60)
    raise AssertionError(f"step {number} was never reached: {output}{errors}")


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no SIGTERM to send to another process"
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_process_on_a_run_is_refused_and_a_signal_saves_and_says_how_to_go_on(
    here: Path, number: int, status: int
) -> None:
    process = start(here, "train", "--name", "mine", *SETTINGS)
    wait_for_step(here, 3, process)
    second = lapclip("resume", "mine")
    assert second.returncode == 2
    assert "Another process is working on" in second.stderr
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "lapclip resume mine" in output
    assert "Traceback" not in errors
    last = events(here)[-1]
    assert last["type"] == "stopped"
    assert (here / "runs/mine/checkpoints" / f"step-{last['step']:08d}").is_dir()


def wait_on_terminal(folder: Path, number: int, terminal: int) -> None:
    """Wait for a step of a process that writes to a terminal, which has to be read or it would block."""
    os.set_blocking(terminal, False)
    limit = time.monotonic() + 90
    while not any(
        event.get("step") == number for event in read_events(folder / "runs/mine/events.jsonl")
    ):
        assert time.monotonic() < limit
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("again", [False, True])
def test_closing_the_terminal_saves(here: Path, again: bool) -> None:
    """The process leads a session on a real terminal, which is closed under it."""
    import fcntl
    import pty
    import termios

    arguments = ["train", "--name", "mine", *SETTINGS]
    if again:
        train_small("train.steps=100", name="mine", callbacks=stop_after(3))
        arguments = ["resume", "mine"]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    wait_on_terminal(here, 10, terminal)
    os.close(terminal)
    assert process.wait(60) == 128 + signal.SIGHUP
    last = events(here)[-1]
    assert (last["type"], last["reason"]) == ("stopped", "SIGHUP")
    assert (here / "runs/mine/checkpoints" / f"step-{last['step']:08d}").is_dir()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    def ignore_hangups() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = subprocess.Popen(
        command("train", "--name", "mine", *SETTINGS, "--set", "train.steps=40"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=ignore_hangups,
        text=True,
    )
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(90) == 0
    assert events(tmp_path)[-1]["type"] == "finished"


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no SIGINT to send to another process"
)
def test_an_interrupt_while_images_are_drawn_says_so(tmp_path: Path) -> None:
    process = start(tmp_path, "train", "--set", "model.name=tiny", "--set", "data.seed=77")
    assert process.stderr is not None
    assert any(
        "drawing" in line for line in process.stderr
    )  # where there is a GPU, it is checked first
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in errors
    assert "lapclip resume first-run" in errors
    assert [event["type"] for event in events(tmp_path)] == ["stopped"]


def test_commands_without_a_name_take_the_newest_run_that_fits(here: Path, trained: Path) -> None:
    train_small("train.steps=40", name="older", callbacks=stop_after(3))
    process = start(here, "train", "--name", "going", *SETTINGS, "--set", "train.steps=100000")
    wait_for_step(here, 10, process)  # the other run has not come so far
    shutil.copytree(trained, here / "runs/done")
    future = time.time() + 60
    os.utime(here / "runs/done/run.toml", (future, future))  # the newest
    watched = lapclip("watch", "--once")
    assert watched.stdout.startswith("going  running")
    stopped = lapclip("stop", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert "Stopping runs/going." in stopped.stderr.replace("\\", "/")
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert process.wait(30) == 0
    for arguments, reason in (([], "No run is running"), (["going"], "not running; it is stopped")):
        again = lapclip("stop", *arguments)
        assert again.returncode == 2
        assert reason in again.stderr
    shutil.rmtree(here / "runs/going")
    resumed = lapclip("resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming runs/older." in resumed.stderr.replace("\\", "/")
    assert json.loads(resumed.stdout)["state"] == "finished"
    for arguments in (["resume"], ["resume", "--background"]):
        nothing = lapclip(*arguments)
        assert nothing.returncode == 2
        assert "There is nothing to resume" in nothing.stderr

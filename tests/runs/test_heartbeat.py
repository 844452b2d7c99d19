from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lapclip.errors import RunBusy
from lapclip.runs import heartbeat as pulse
from lapclip.runs.folder import Run
from lapclip.runs.heartbeat import LATE, Beat, Pulse, beat_of, read_beat, write_beat
from lapclip.suggest import command

from ..conftest import wait_until


def test_a_process_that_lives_is_known_by_number_and_beginning() -> None:
    beat = beat_of(os.getpid())
    assert beat.alive
    assert not replace(
        beat, began=beat.began - 100
    ).alive  # another process that has the number now
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    there = beat_of(child.pid)
    assert there.alive
    child.kill()
    # Nobody has asked how it ended: the system keeps its number.
    wait_until(lambda: not there.alive)
    child.wait()
    assert not there.alive


@pytest.mark.skipif(sys.platform != "linux", reason="the boot time is read from /proc")
@pytest.mark.parametrize("jump", [-86_400, -3, 1, 3600])
def test_a_process_is_known_after_the_clock_was_set(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    beat, boot_time, now = beat_of(os.getpid()), psutil._pslinux.boot_time, time.time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + jump)
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    assert psutil.Process().create_time() == pytest.approx(psutil.boot_time() + beat.began, abs=2)
    assert beat.alive
    assert not replace(beat, began=beat.began - 10).alive


def test_on_another_computer_the_heartbeat_decides() -> None:
    far = Beat(
        process=os.getpid(), began=0.0, host=platform.node() + " of others", time=time.time()
    )
    assert far.alive
    assert not replace(far, time=time.time() - LATE - 1).alive


@pytest.mark.parametrize("ahead", [0, 3600, -3600])
def test_a_run_that_another_computer_works_on_is_refused_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    monkeypatch.setattr(pulse, "EVERY", 0.05)
    run = Run(tmp_path / "mine")
    far = Beat(process=1, began=0.0, host="far away\x1b[2J", time=time.time() + ahead)
    write_beat(run.pulse, far)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            write_beat(run.pulse, replace(far, time=time.time() + ahead))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunBusy, match="far away") as refusal, run.lock():
            pass
    finally:
        over.set()
        thread.join()
    assert command("stop", tmp_path / "mine") in refusal.value.hint  # it lies elsewhere
    assert "\x1b" not in str(refusal.value)
    assert run.running == (ahead == 0)  # a list of runs cannot wait for the next beat


@pytest.mark.parametrize("ago", [LATE + 1, 7200, 100_000])
def test_a_computer_that_crashed_keeps_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ago: float
) -> None:
    monkeypatch.setattr(pulse, "EVERY", 0.05)
    run = Run(tmp_path / "mine")
    write_beat(run.pulse, Beat(process=1, began=0.0, host="far away", time=time.time() - ago))
    with run.lock():
        assert run.running
    assert not run.running
    assert ("far away" in capsys.readouterr().err) == (
        ago < 100_000
    )  # where it has to be waited for


def test_a_pulse_beats_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "EVERY", 0.01)
    path = tmp_path / "deeper" / "pulse"
    with Pulse(path, "a run"):
        while not (first := read_beat(path)):
            time.sleep(0.01)
        while not (later := read_beat(path)) or later.time <= first.time:
            time.sleep(0.01)
        assert first.alive
        assert later.about == "a run"
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "[" * 100_000, '{"process": 1}', '{"surprise": 1}',
     '{"process": 1, "began": 1, "host": "far", "time": "now"}'],
)  # fmt: skip
def test_a_damaged_beat_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "pulse").write_text(text)
    assert read_beat(tmp_path / "pulse") is None
    assert read_beat(tmp_path / "missing") is None


def test_a_beat_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_beat(tmp_path / "file" / "pulse", beat_of(os.getpid()))
    write_beat(tmp_path / "pulse", beat_of(os.getpid()))
    assert json.loads((tmp_path / "pulse").read_text())["process"] == os.getpid()

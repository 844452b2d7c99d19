from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lapclip.runs import heartbeat as pulse
from lapclip.runs.heartbeat import LATE, Beat, Pulse, beat_of, read_beat, write_beat


def test_a_process_that_lives_is_known_by_number_and_beginning() -> None:
    beat = beat_of(os.getpid())
    assert beat.alive
    assert not replace(beat, began=beat.began - 100).alive  # another process that has the number now
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    there = beat_of(child.pid)
    assert there.alive
    child.kill()
    deadline = time.monotonic() + 30
    while there.alive and time.monotonic() < deadline:  # nobody has asked how it ended: the system keeps its number
        time.sleep(0.01)
    assert not there.alive
    child.wait()
    assert not there.alive


def test_on_another_computer_the_heartbeat_decides() -> None:
    far = Beat(process=os.getpid(), began=0.0, host=platform.node() + " of others", time=time.time())
    assert far.alive
    assert not replace(far, time=time.time() - LATE - 1).alive


def test_a_pulse_beats_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY", 0.01)
    paths = [tmp_path / "pulse", tmp_path / "deeper" / "pulse"]
    with Pulse(paths, "a run"):
        while not (first := read_beat(paths[1])):
            time.sleep(0.01)
        while not (later := read_beat(paths[0])) or later.time <= first.time:
            time.sleep(0.01)
        assert first.alive
        assert later.about == "a run"
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": 1}', '{"surprise": 1}'])
def test_a_damaged_beat_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "pulse").write_text(text)
    assert read_beat(tmp_path / "pulse") is None
    assert read_beat(tmp_path / "missing") is None


def test_a_beat_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_beat(tmp_path / "file" / "pulse", beat_of(os.getpid()))
    write_beat(tmp_path / "pulse", beat_of(os.getpid()))
    assert json.loads((tmp_path / "pulse").read_text())["process"] == os.getpid()

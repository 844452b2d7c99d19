from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from lapclip.machine import desktop
from lapclip.machine.desktop import guard_command, kept_awake


def test_macos_is_kept_awake_by_caffeinate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(desktop, "program", lambda name: f"/usr/bin/{name}")
    assert guard_command() == ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]


def test_linux_is_kept_awake_by_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(desktop, "program", lambda name: f"/usr/bin/{name}")
    command = guard_command() or []
    assert command[:2] == ["/usr/bin/systemd-inhibit", "--what=sleep:idle"]
    assert command[-1] == f"--pid={os.getpid()}"
    monkeypatch.setattr(desktop, "program", lambda name: None)
    assert guard_command() is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no guard process")
def test_the_guard_lives_as_long_as_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(desktop, "guard_command", lambda: [sys.executable, "-c", "input()"])
    monkeypatch.setattr(desktop.subprocess, "DEVNULL", desktop.subprocess.PIPE)
    before = set(psutil.Process().children())
    with kept_awake() as kept:
        assert kept
        (guard,) = set(psutil.Process().children()) - before
        assert guard.is_running()
    assert not guard.is_running()


def test_nothing_happens_where_it_is_not_wanted_or_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kept_awake(wanted=False) as kept:
        assert not kept
    if sys.platform != "win32":
        monkeypatch.setattr(desktop, "guard_command", lambda: ["no-such-program-anywhere"])
        with kept_awake() as kept:
            assert not kept

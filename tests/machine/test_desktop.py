from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lapclip.machine import desktop
from lapclip.machine.desktop import guard_command, kept_awake, notice_command, notify

MARKUP = 'a "run"; $(reboot) `x`'


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


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_text_never_becomes_part_of_a_script(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(desktop, "program", lambda name: f"/usr/bin/{name}")
    command, variables = notice_command(MARKUP, "done") or ([], {})
    assert command
    assert all(MARKUP not in part for part in command)
    assert variables == {"LAPCLIP_TITLE": MARKUP, "LAPCLIP_TEXT": "done"}


def test_linux_asks_the_desktop_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(desktop, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert notice_command("a", "b") is None
    assert not notify("a", "b")
    monkeypatch.setenv("DISPLAY", ":0")
    assert notice_command("--a", "b") == (
        ["/usr/bin/notify-send", "--app-name=lapclip", "--", "--a", "b"],
        {},
    )


def test_a_program_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(desktop, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(subprocess, "Popen", gone)
    assert not notify("a", "b")

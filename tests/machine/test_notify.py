from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from lapclip.machine.notify import notice_command, notify

MARKUP = 'a "run"; $(reboot) `x`'


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_words_never_become_part_of_a_script(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    command, words = notice_command(MARKUP, "done") or ([], {})
    assert command
    assert all(MARKUP not in part for part in command)
    assert words == {"LAPCLIP_TITLE": MARKUP, "LAPCLIP_TEXT": "done"}


def test_linux_asks_the_desktop_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert notice_command("a", "b") is None
    assert not notify("a", "b")
    monkeypatch.setenv("DISPLAY", ":0")
    assert notice_command("--a", "b") == (["notify-send", "--app-name=lapclip", "--", "--a", "b"], {})


def test_a_program_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(subprocess, "Popen", gone)
    assert not notify("a", "b")

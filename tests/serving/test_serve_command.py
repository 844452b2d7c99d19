"""The command: whom it lets in, what it says, how it takes a newer model and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lapclip.cli.app import main
from lapclip.commands import serve
from lapclip.commands.serve import ServeOptions, prepare, read_key
from lapclip.errors import ConfigError
from lapclip.machine.facts import python

needs_posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_beyond_this_computer_a_key_is_needed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "mine", "--host", "0.0.0.0")
    assert "lapclip serve mine --host 0.0.0.0 --api-key-file key.txt" in said
    assert "secrets.token_urlsafe" in said


@pytest.mark.parametrize("content", [b"short", b"two words that are long enough", b"a" * 20 + b"\nb", b"\xff" * 20])
def test_a_file_without_a_usable_key_is_refused(here: Path, content: bytes) -> None:
    (here / "key.txt").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_key(here / "key.txt")
    assert "key" in error.value.message
    assert "aaaaa" not in str(error.value)


def test_a_key_is_read_and_who_else_can_read_it_is_said(here: Path) -> None:
    path = here / "key.txt"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_key(path) == ("0123456789abcdef", [])
    if os.name != "nt":
        path.chmod(0o644)
        assert "chmod 600" in read_key(path)[1][0]
        (here / "pipe").unlink(missing_ok=True)
        os.mkfifo(here / "pipe")
        with pytest.raises(ConfigError):
            read_key(here / "pipe")


def test_a_missing_extra_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        prepare(ServeOptions())
    assert error.value.hint == 'pip install "lapclip[serve]"'


def test_reload_without_a_server_says_so(here: Path, empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No server is running" in refused(capsys, "--reload")


class Process:
    """A server of its own process, and callers who ask it all the time."""

    def __init__(self, *arguments: str) -> None:
        command = python("-m", "lapclip", "serve", *arguments, "--json", "--port", "0", "--threads", "1")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        self.said: dict[str, Any] = json.loads(line)
        self.answers: Counter[tuple[int, str]] = Counter()
        self._over = threading.Event()
        self._callers = [threading.Thread(target=self._call, args=(at,)) for at in range(4)]

    def _call(self, caller: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            self.answers[self.ask(f"caller {caller} turn {turn}")] += 1

    def ask(self, text: str) -> tuple[int, str]:
        body = json.dumps({"items": [{"text": text}]}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.said["url"] + "/embed", body, headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert json.loads(answer.read())["model"] == answer.headers["X-Lapclip-Model"]
                return answer.status, answer.headers["X-Lapclip-Model"]
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError as error:
            return 0, type(error).__name__

    def __enter__(self) -> Process:
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for caller in self._callers:
            caller.join(30)
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def change(run: Path, factor: float) -> None:
    """Another model in place of the run's: its text tower is scaled, or, with nan, broken."""
    path = run / "model" / "model.safetensors"
    tensors = {name: value * factor if name == "text.projection" else value for name, value in load_file(path).items()}
    assert "text.projection" in tensors
    save_file(tensors, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@needs_posix
def test_newer_models_are_taken_under_load_without_a_failed_request(
    trained: Path, here: Path, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = here / "runs" / "mine"
    shutil.copytree(trained, run)
    server = Process("mine")
    first = server.said["fingerprint"]
    with server:
        # SIGHUP
        change(run, 1.5)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.ask("which")[1] not in (first, ""))
        second = server.ask("which")[1]
        # the command, by the run's name
        change(run, 1.5)
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--reload", "mine", "--json"])
        assert ended.value.code == 0
        said = json.loads(capsys.readouterr().out)
        assert said["taken"]
        third = said["fingerprint"]
        assert len({first, second, third}) == 3
        assert server.ask("which") == (200, third)
        # one that is broken
        change(run, float("nan"))
        assert "no numbers" in refused(capsys, "--reload", "mine")
        assert server.ask("which") == (200, third)
        assert {status for status, _ in server.answers} == {200}
        assert {model for _, model in server.answers} >= {first, second, third}
        # the end: what was accepted is answered, and nothing else is taken
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    assert {status for status, _ in server.answers} <= {200, 503, 0}
    assert not list((empty_cache / "serving").iterdir())


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)

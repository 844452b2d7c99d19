"""The command: whom it lets in, what it says, how it takes a newer model and how it ends."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lapclip.cli.app import main
from lapclip.commands import serve
from lapclip.commands.serve import (
    ServeOptions,
    curl_command,
    open_service,
    read_key,
    served_name,
)
from lapclip.errors import ConfigError
from lapclip.machine.facts import python
from lapclip.measure.timing import Timer
from lapclip.serving import choose_engine, swap
from lapclip.serving.engine import Engine
from lapclip.serving.metrics import Metrics
from lapclip.serving.model_forms import Stamps
from lapclip.serving.refusals import Unavailable
from lapclip.serving.service import ServedModel, Service
from lapclip.serving.swap import Swapper
from lapclip.which_model import WhichModel, which_model

from ..conftest import wait_until
from .conftest import Serving, engine_of, jpeg, serving

needs_posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_beyond_this_computer_a_key_is_needed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "mine", "--host", "0.0.0.0")
    assert "lapclip serve mine --host 0.0.0.0 --api-key-file key.txt" in said
    assert "secrets.token_urlsafe" in said


def test_behind_a_proxy_a_key_is_needed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "mine", "--allow-host", "clip.example.org")
    assert "lapclip serve mine --allow-host clip.example.org --api-key-file key.txt" in said


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Clip.example.org", "clip.example.org"),
        ("clip.example.org:8443", "clip.example.org"),
        ("https://clip.example.org/", "clip.example.org"),
        ("[::1]:80", "::1"),
        ("::1", "::1"),
        ("*", None),
        ("", None),
        ("a b", None),
    ],
)
def test_a_name_of_the_server_is_taken_without_its_port(given: str, name: str | None) -> None:
    options = ServeOptions(allow_hosts=(given,))
    if name is not None:
        assert serve._host_name(given, options) == name
    else:
        with pytest.raises(ConfigError) as error:
            serve._host_name(given, options)
        assert (
            error.value.hint == "lapclip serve --allow-host clip.example.org --api-key-file key.txt"
        )


@pytest.mark.parametrize("deadline", ["inf", "nan", "1e9", "0"])
def test_a_deadline_without_sense_is_refused_at_once(
    here: Path, capsys: pytest.CaptureFixture[str], deadline: str
) -> None:
    said = refused(capsys, "--deadline", deadline)
    assert "0.1 to 3600" in said
    assert "lapclip serve --deadline 1" in said


@pytest.mark.parametrize(
    "content", [b"short", b"two words that are long enough", b"a" * 20 + b"\nb", b"\xff" * 20]
)
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


def test_a_key_that_powershell_wrote_is_read(here: Path) -> None:
    (here / "key.txt").write_bytes("0123456789abcdef\r\n".encode("utf-16"))
    assert read_key(here / "key.txt")[0] == "0123456789abcdef"


@pytest.mark.skipif(sys.platform == "win32", reason="there it asks only whether it is ready")
def test_a_request_can_be_pasted() -> None:
    typed = curl_command("http://a:1", Path("my key"))
    assert typed.startswith(
        """curl http://a:1/embed -H "Authorization: Bearer $(cat 'my key')" -H 'Cont"""
    )


def test_a_missing_extra_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        open_service(ServeOptions())
    assert "[serve]" in error.value.hint
    assert (
        "python_multipart" in error.value.message
    )  # as it is imported; `multipart` is another package


def test_a_name_that_is_no_text_can_be_told(trained: Path) -> None:
    which = WhichModel(
        Path("café".encode("latin-1").decode("utf-8", "surrogateescape")), None, "asked for"
    )
    metrics = Metrics()
    engine = engine_of(trained)
    name = served_name(ServeOptions(), which)
    service = Service(ServedModel(name, engine, 0), metrics=metrics)
    assert b"caf" in metrics.text()
    service.close()


class Process:
    """A server of its own process, and callers who ask it all the time."""

    def __init__(self, *arguments: str) -> None:
        command = python(
            "-m", "lapclip", "serve", *arguments, "--json", "--port", "0", "--threads", "1"
        )
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
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
            answer = self.ask(f"caller {caller} turn {turn}")
            self.answers[answer] += 1
            if answer[0] != 200:  # the server is ending: it needs the processor more
                self._over.wait(0.2)

    def ask(self, text: str) -> tuple[int, str]:
        return self.send({"text": text})

    def send(self, *items: dict[str, str]) -> tuple[int, str]:
        body = json.dumps({"items": items}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.said["url"] + "/embed", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.loads(answer.read())["model"] == answer.headers["X-Lapclip-Model"]
                return answer.status, answer.headers["X-Lapclip-Model"]
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError as error:
            return 0, type(error).__name__

    @property
    def queue(self) -> float:
        """Items that were accepted and are not answered."""
        return self.metric("lapclip_queue_items")

    @property
    def refused_models(self) -> float:
        """Newer models that failed their check."""
        return self.metric('lapclip_swaps_total{result="refused"}')

    def metric(self, name: str) -> float:
        """Return a figure of `/metrics`, 0 while it has not been counted."""
        with urllib.request.urlopen(self.said["url"] + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name} ")]
        return float(values[0]) if values else 0.0

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
    tensors = {
        name: value * factor if name == "text.projection" else value
        for name, value in load_file(path).items()
    }
    assert "text.projection" in tensors
    save_file(tensors, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.slow
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
        wait_until(lambda: server.ask("which")[1] not in (first, ""))
        second = server.ask("which")[1]
        # the same again
        change(run, 1.5)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.ask("which")[1] not in (first, second, ""))
        third = server.ask("which")[1]
        # one that is broken
        change(run, float("nan"))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.refused_models == 1)
        assert server.ask("which") == (200, third)
        assert {status for status, _ in server.answers} == {200}
        assert {model for _, model in server.answers} >= {first, second, third}
        # the end: what was accepted is answered
        photo = jpeg(0, 4000, 3000)
        photos = [{"image": base64.b64encode(photo + bytes([at])).decode()} for at in range(8)]
        with ThreadPoolExecutor(2) as callers:
            accepted = [callers.submit(server.send, *photos[at::2]) for at in range(2)]
            wait_until(lambda: server.queue >= len(photos), every=0.005)
            server.process.send_signal(signal.SIGTERM)
            assert [each.result(60) for each in accepted] == [(200, third)] * 2
        assert server.process.wait(60) == 0
    assert {status for status, _ in server.answers} <= {200, 503, 0}  # what came later is not


def swaps(service: Service) -> list[float]:
    """Newer models that were taken, and that were refused."""
    text = service.metrics.text().decode().splitlines()
    counted = dict(line.rsplit(" ", 1) for line in text if line.startswith("lapclip_swaps_total"))
    return [
        float(counted.get(f'lapclip_swaps_total{{result="{result}"}}', 0))
        for result in ("taken", "refused")
    ]


@contextmanager
def swapping(
    trained: Path, here: Path, **options: Any
) -> Iterator[tuple[Serving, Swapper, Path, list[str]]]:
    """A server of a copy of the run, what swaps its models, the run, and what was logged."""
    run, said = here / "runs" / "mine", []
    shutil.copytree(trained, run)
    which = which_model("mine")
    stamps = Stamps.of(which)
    with serving(run) as served:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        def make(engine: Engine) -> ServedModel:
            return ServedModel("mine", engine, 0)

        swapper = Swapper(
            served.service, which, make, stamps, log=said.append, every=0.02, **options
        )
        swapper.start(loop)
        yield served, swapper, run, said
        swapper.stop()
        loop.call_soon_threadsafe(loop.stop)


def test_follow_takes_what_the_run_saves_and_refuses_what_is_broken(
    trained: Path, here: Path, empty_cache: Path
) -> None:
    with swapping(trained, here, follow=True) as (served, _, run, said):
        service = served.service
        first = service.model.fingerprint
        change(run, 1.5)
        wait_until(lambda: swaps(service)[0] == 1)
        second = service.model.fingerprint
        assert (
            served.post("/embed", {"items": [{"text": "a cat"}]}).json["model"] == second != first
        )
        change(run, float("nan"))
        wait_until(lambda: swaps(service)[1] == 1)
        assert service.model.fingerprint == second
        wait_until(lambda: any("no numbers" in line for line in said))
        (run / "model" / "model.safetensors").write_bytes(b"half a file")
        wait_until(lambda: swaps(service)[1] == 2)
        assert served.get("/ready").status == 200
        time.sleep(0.1)  # some looks more: nothing is tried twice
    assert [line.startswith("not taken") for line in said] == [False, True, True]


def busy_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check of a newer model is not answered in time."""
    real, asked = service.test, []

    async def test(model: ServedModel) -> Any:
        asked.append(model)
        return Unavailable("not answered") if len(asked) == 1 else await real(model)

    monkeypatch.setattr(service, "test", test)


def test_a_model_that_was_refused_is_tried_again_when_asked(
    trained: Path, here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swapping(trained, here) as (served, swapper, run, _):
        assert swapper.take_newer().state == "same"
        change(run, 1.5)
        busy_once(served.service, monkeypatch)
        assert swapper.take_newer().state == "refused"
        assert swapper.take_newer().state == "taken"
        assert swapper.take_newer().state == "same"
        change(run, float("nan"))
        assert [swapper.take_newer().state for _ in range(2)] == ["refused", "refused"]


def test_follow_tries_again_what_a_busy_server_refused(
    trained: Path, here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swapping(trained, here, follow=True, retry=0.1) as (served, _, run, said):
        busy_once(served.service, monkeypatch)
        change(run, 1.5)
        wait_until(lambda: len(said) == 2)
        assert swaps(served.service) == [1, 1]


def test_a_loop_that_does_not_answer_ends_no_thread_and_swaps_nothing_later(
    trained: Path, here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "SWAP_SECONDS", 0.05)
    with swapping(trained, here) as (served, swapper, run, said):
        assert swapper._loop is not None
        first, release = served.service.model, threading.Event()
        swapper._loop.call_soon_threadsafe(release.wait, 20)
        change(run, 1.5)
        swapper.ask()
        wait_until(lambda: len(said) == 1)
        assert "busy" in said[0]
        release.set()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), swapper._loop).result(5)
        assert served.service.model is first
        with monkeypatch.context() as patch:
            patch.setattr(swapper, "_look", lambda: 1 / 0)
            wait_until(lambda: len(said) == 2)
            assert "ZeroDivisionError" in said[1]
        monkeypatch.setattr(swap, "SWAP_SECONDS", 20)
        swapper.ask()
        wait_until(lambda: served.service.model is not first)
    assert len(said) <= 3


@needs_posix
@pytest.mark.parametrize("request_newer", ["--follow", "SIGHUP"])
def test_a_model_that_was_saved_during_the_start_is_taken_the_first_is_freed_and_the_token_is_not_logged(
    trained: Path,
    here: Path,
    empty_cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request_newer: str,
) -> None:
    run = here / "runs" / "mine"
    shutil.copytree(trained, run)
    (here / "key.txt").write_text("0123456789abcdef")
    real, seen, freed = choose_engine.check_finite, [], []

    def check_finite(engine: Engine) -> None:
        seen.append(weakref.ref(engine.encoder))
        change(run, 1.5)  # between opening the model and listening
        if request_newer == "SIGHUP":
            signal.raise_signal(signal.SIGHUP)
        real(engine)

    def until_freed() -> None:
        try:
            wait_until(lambda: gc.collect() >= 0 and seen[0]() is None, seconds=10)
            freed.append(True)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    start = Swapper.start

    def started(swapper: Swapper, loop: asyncio.AbstractEventLoop) -> None:
        swapper._every = 0.05
        start(swapper, loop)
        threading.Thread(target=until_freed, daemon=True).start()

    monkeypatch.setattr(choose_engine, "check_finite", check_finite)
    monkeypatch.setattr(Swapper, "start", started)
    monkeypatch.setattr(choose_engine, "TIMER", Timer(rounds=1))
    flags = ["--follow"] if request_newer == "--follow" else []
    options = ["--port", "0", "--threads", "1", "--api-key-file", "key.txt"]
    with pytest.raises(SystemExit) as ended:
        main(["serve", "mine", *flags, *options])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert freed == [True]
    assert "in place of" in said.err
    assert "Page: http://127.0.0.1:" in said.out
    assert "token=" not in said.out + said.err
    assert "--json" in said.out

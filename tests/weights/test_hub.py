"""Models by name, from a hub of our own: a web server that speaks as much of the hub's language as is needed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import lapclip
from lapclip.errors import RunError, WeightsError
from lapclip.weights import is_hub_name
from lapclip.weights.hub import _PartialFile, confirm_name

from .made import embedder, save_openclip

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = "import sys, lapclip; print(lapclip.load(sys.argv[1]).model.shape.name)"
EVAL = """
import sys
from lapclip.cli import main

for name in sys.argv[1:]:
    try:
        main(["eval", name, "scenes"])
    except SystemExit as end:
        print(end.code, flush=True)
    print("end", file=sys.stderr, flush=True)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one model, `someone/small`, and what it was asked for."""
    folder = save_openclip(embedder(), tmp_path / "on-the-hub")
    (folder / "large.msgpack").write_bytes(b"not wanted")
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            if self.path.startswith("/api/models/someone/small/tree/"):
                sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
                tree = [
                    {"type": "file", "path": name, "size": size, "oid": name}
                    for name, size in sizes.items()
                ]
                self._answer(json.dumps(tree).encode())
            elif self.path.startswith("/api/models/someone/small"):
                files = [{"rfilename": path.name} for path in folder.iterdir()]
                self._answer(
                    json.dumps({"id": "someone/small", "sha": COMMIT, "siblings": files}).encode()
                )
            elif self.path.startswith("/someone/small/resolve/"):
                self._answer((folder / self.path.rpartition("/")[2]).read_bytes())
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def ask(
    program: str, *names: str, home: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the address of the hub is read once."""
    known = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    return subprocess.run(
        [sys.executable, "-c", program, *names],
        env=known | {"HF_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_name_is_downloaded_once_and_then_found_offline(
    hub: tuple[str, list[str]], tmp_path: Path, here: Path
) -> None:
    address, asked = hub
    done = ask(LOAD, "hf:someone/small", home=tmp_path / "home", HF_ENDPOINT=address)
    assert done.stdout.strip() == "vit-64x2-8", done.stderr
    assert not any("large.msgpack" in path for path in asked)
    offline = ask(
        LOAD, "someone/small", home=tmp_path / "home", HF_ENDPOINT=address, HF_HUB_OFFLINE="1"
    )
    assert offline.stdout.strip() == "vit-64x2-8", offline.stderr


@pytest.mark.parametrize(
    ("offline", "messages"),
    [
        (
            "",
            {
                "hf:someone/else": "no file or folder someone/else, and no model of that name on the",
                "someone/small": "hf:someone/small",  # it may be a mistyped path
            },
        ),
        (
            "1",
            {
                "hf:someone/small": "folder someone/small, and the Hugging Face hub cannot be reached",
            },
        ),
    ],
)
def test_a_model_that_is_not_downloaded_is_said_so(
    offline: str, messages: dict[str, str], hub: tuple[str, list[str]], tmp_path: Path, here: Path
) -> None:
    done = ask(EVAL, *messages, home=tmp_path / "home", HF_ENDPOINT=hub[0], HF_HUB_OFFLINE=offline)
    assert done.stdout.split() == ["2"] * len(messages)
    answers = done.stderr.split("end\n")[:-1]
    for answer, message in zip(answers, messages.values(), strict=True):
        assert message in answer
        assert len(answer.strip().splitlines()) <= 3
    assert not any("resolve" in path for path in hub[1])


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_at_a_terminal_it_is_asked_for(
    answer: str, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    if answer == "y":
        assert confirm_name("someone/small") == "someone/small"
    else:
        with pytest.raises(WeightsError, match="hf:"):
            confirm_name("someone/small")
    assert "someone/small" in shown.getvalue()


def test_paths_are_never_names_on_the_hub(here: Path) -> None:
    (here / "models").mkdir()
    for path in ("runs/mistyped", "models/mistyped", "./someone/small", "~/someone/small", "/someone/small",
                 "a/b/c", "../a/b", "hf:", "hf:small", "hf:../../x", "hf:a/b/c", "small"):  # fmt: skip
        assert not is_hub_name(path), path
    assert is_hub_name("someone/small")
    assert is_hub_name("hf:someone/small")
    assert is_hub_name("hf:runs/mine")
    with pytest.raises(RunError, match="no folder runs/first-run"):
        lapclip.load("runs/first-run")


class ShortWrites(io.FileIO):
    """A file that takes seven bytes at a time, as a disk that is nearly full may."""

    def write(self, data: Any, /) -> int:
        return super().write(data[:7])


def test_all_of_a_piece_is_written_if_the_disk_takes_parts(tmp_path: Path) -> None:
    class ShortPartialFile(_PartialFile, ShortWrites):
        pass

    with ShortPartialFile(tmp_path / "part", 100, None) as file:
        assert file.write(bytes(range(100))) == 100
    assert (tmp_path / "part").read_bytes() == bytes(range(100))


def test_a_part_that_is_too_long_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(101))
    with _PartialFile(tmp_path / "part", 100, None) as file:
        assert file.tell() == 0
        file.write(b"new")
    assert (tmp_path / "part").read_bytes() == b"new"

"""`--machines` and `lapclip join` as people type them, in network namespaces: two computers as far as a network goes."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lapclip.commands.join import parse_place
from lapclip.errors import ConfigError
from lapclip.runs.folder import find_run

from ..conftest import SMALL, command, lapclip, set_flags
from ..hosts import Hosts, missing
from ..small_runs import events, losses, photos, train

HOST, GUEST = 0, 1
WAIT_SECONDS = 100.0
PLAIN = [setting for setting in SMALL if not setting.startswith("data.train_pairs")]
LONG = ["train.steps=100000", "train.checkpoint_every_seconds=1", "train.timeout_seconds=20"]


class Computers:
    """A host and a guest, and what their commands print."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder

    def start(self, at: int, *arguments: str, typed: str = "") -> subprocess.Popen[str]:
        """Start a command. `typed` is what a person types when it asks."""
        errors = (self._folder / f"errors-{at}").open("a")
        key = self._folder / "key"
        key.write_text(typed)
        words = ["sh", "-c", 'exec "$@" < "$0"', str(key), *command(*arguments)]
        output = subprocess.PIPE
        return self.hosts.start(at, words, stdout=output, stderr=errors)

    def join(self) -> subprocess.Popen[str]:
        """Join with the key that the host shows."""
        self.wait_for(HOST, "The key is")
        key = re.search(r"The key is:\s+([A-Z2-7 ]+)\n", self.printed(HOST))
        assert key
        place = f"{self.hosts.address(HOST)}:29400"
        return self.start(GUEST, "join", place, "--json", typed=key[1])

    def printed(self, at: int) -> str:
        return (self._folder / f"errors-{at}").read_text(errors="replace")

    def wait_for(self, at: int, words: str) -> None:
        wait_until(lambda: words in self.printed(at), lambda: self.printed(HOST) + self.printed(1))


def wait_until(is_done: Callable[[], bool], describe: Callable[[], str]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not is_done():
        assert time.monotonic() < until, describe()
        time.sleep(0.1)


def result(process: subprocess.Popen[str]) -> Any:
    """Return the one JSON object that a command prints."""
    return json.loads(process.communicate(timeout=WAIT_SECONDS)[0])


@pytest.fixture
def computers(tmp_path: Path) -> Iterator[Computers]:
    if missing():
        pytest.skip(missing())
    with Hosts(2, tmp_path / "hosts") as hosts:
        yield Computers(hosts, tmp_path)


def test_two_computers_learn_what_one_does(
    computers: Computers, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, guest = (computers.hosts.folder(at) for at in (HOST, GUEST))
    photos(host / "photos")
    flags = ["photos", "--recipe", "first-run", *set_flags(*PLAIN), "--name", "both"]
    at_host = computers.start(HOST, "train", *flags, "--machines", "2", "--json")
    at_guest = computers.join()
    outcome, joined = result(at_host), result(at_guest)
    printed = computers.printed(HOST) + computers.printed(GUEST)
    assert (at_host.returncode, at_guest.returncode) == (0, 0), printed
    assert outcome["state"] == "finished"
    assert joined["host"] == "10.78.0.1:29400"
    assert joined["copied_bytes"] > 29 * 40 * 40 * 3
    assert not (guest / "runs").exists()
    assert len(list((guest / "cache").glob("bundle-*"))) == 1
    assert "Traceback" not in printed
    assert "torch.distributed" not in printed
    monkeypatch.chdir(host)
    train("first-run", [*PLAIN, f"data.source={json.dumps(str(host / 'photos'))}"], name="alone")
    assert len(losses("both")) == 12
    assert losses("both") == pytest.approx(losses("alone"), rel=1e-3)


@pytest.mark.slow
def test_a_guest_that_was_killed_can_come_back(
    computers: Computers, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*set_flags(*SMALL, *LONG), "--name", "both"]
    at_host = computers.start(HOST, "train", *flags, "--machines", "2", "--json")
    computers.join()
    computers.wait_for(HOST, "step 2")
    computers.hosts.kill(GUEST)
    computers.wait_for(HOST, "continues without host-2")
    at_guest = computers.join()
    computers.wait_for(HOST, "host-2 joined")
    monkeypatch.chdir(computers.hosts.folder(HOST))
    assert lapclip("stop", "both").returncode == 0
    assert result(at_host)["state"] == "stopped"
    result(at_guest)
    assert (at_host.returncode, at_guest.returncode) == (0, 0)
    assert "--machines 2" in find_run("both").resume_command()
    assert len(events("resumed", "both")) == 2


@pytest.mark.slow
def test_a_wrong_key_and_an_interrupted_host(computers: Computers) -> None:
    at_host = computers.start(HOST, "train", *set_flags(*SMALL), "--machines", "2")
    computers.wait_for(HOST, "The key is")
    place = f"{computers.hosts.address(HOST)}:29400"
    stranger = computers.start(GUEST, "join", place, typed="ABCD EFGH IJKL MNOP")
    assert stranger.wait(WAIT_SECONDS) == 2
    assert "has another key" in computers.printed(GUEST)
    at_host.send_signal(signal.SIGINT)
    assert at_host.wait(WAIT_SECONDS) == 130
    assert "Traceback" not in computers.printed(HOST) + computers.printed(GUEST)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--machines", "1"], "too few"),
        (["train", "--machines", "2", "--background"], "--background"),
        (["train", "--machines", "2", "--set", "train.parallel=fsdp"], "trains with DDP"),
        (["train", "--machines", "2", "--polite"], "on one alone"),
        (["join", "desktop:nowhere"], "not HOST:PORT"),
        (["join", "127.0.0.1:9"], "not a key"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    arguments: list[str], words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    flags = set_flags(*SMALL) if arguments[0] == "train" else []
    done = lapclip(*arguments, *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


@pytest.mark.parametrize(("place", "port"), [("127.0.0.1:29500", 29500), ("localhost", 29400)])
def test_a_place_has_an_address_and_a_port(place: str, port: int) -> None:
    assert parse_place(place) == ("127.0.0.1", port)


@pytest.mark.parametrize("place", ["", ":29400", "host:99999", "host:port"])
def test_other_texts_are_no_place(place: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_place(place)

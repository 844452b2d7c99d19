"""`lapclip train --machines 2` and `lapclip join`, as two people type them: in two network namespaces, which are two
computers as far as a network goes, with a folder and a cache each."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lapclip.cli.join import own_arguments
from lapclip.cli.output import ARGUMENTS
from lapclip.commands.join import split_place
from lapclip.config import build_config, parse_settings
from lapclip.errors import ConfigError, LostRank
from lapclip.model.shapes import SHAPES
from lapclip.together import AGREED, MACHINES, Agreement
from lapclip.training.distributed import Ranks
from lapclip.training.ranks_in_a_run import check_place

from ..conftest import SMALL, command, lapclip, set_flags
from ..small_runs import losses, photos, train

ROOT = Path(__file__).parents[2]
PLAIN = [setting for setting in SMALL if not setting.startswith("data.train_pairs")]
HOST, GUEST, NETWORK = 0, 1, "10.79.0"
PATIENCE = 100.0


class Computers:
    """Two network namespaces with a cable between them."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "host", folder / "guest"]
        self._names = [f"lapclip-join-{os.getpid()}-{at}" for at in (HOST, GUEST)]
        self._started: list[subprocess.Popen[str]] = []
        for path in self.folders:
            path.mkdir()

    def connect(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        ends = [f"lc{os.getpid()}{at}"[:15] for at in (HOST, GUEST)]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for at, (name, end) in enumerate(zip(self._names, ends, strict=True)):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"{NETWORK}.{at + 1}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "route", "add", "default", "via", f"{NETWORK}.{2 - at}")

    def start(self, at: int, *arguments: str) -> subprocess.Popen[str]:
        folder = self.folders[at]
        variables = {
            **os.environ,
            "LAPCLIP_CACHE": str(folder / "cache"),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }
        errors = (folder / "errors.txt").open("a")
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[at], *command(*arguments)],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that its worker gets Ctrl-C, too, as from a terminal
        )
        errors.close()
        self._started.append(process)
        return process

    def said(self, at: int) -> str:
        return (self.folders[at] / "errors.txt").read_text(errors="replace")

    def await_words(self, at: int, words: str) -> None:
        _until(lambda: words in self.said(at), lambda: f"no {words!r} in {self.said(at)}")

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _until(true: Callable[[], bool], why: Callable[[], str]) -> None:
    ends = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < ends, why()
        time.sleep(0.1)


@pytest.fixture
def computers(tmp_path: Path) -> Iterator[Computers]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces are made by Linux's ip")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    made = Computers(tmp_path)
    try:
        made.connect()
    except subprocess.CalledProcessError as error:
        made.close()
        pytest.skip(
            f"network namespaces cannot be made here: {error.stderr.decode(errors='replace').strip()}"
        )
    try:
        yield made
    finally:
        made.close()


def give_key(computers: Computers) -> None:
    """What a person does who reads the key from one screen and types it at the other."""
    computers.await_words(HOST, "The key is:")
    shutil.copy(computers.folders[HOST] / "cache" / "join-key", computers.folders[GUEST] / "key")


@pytest.mark.slow
def test_two_computers_learn_what_one_process_does(
    computers: Computers, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, guest = computers.folders
    photos(host / "photos")
    flags = ["photos", "--recipe", "first-run", *set_flags(*PLAIN), "--name", "both"]
    at_host = computers.start(HOST, "train", *flags, "--machines", "2", "--json")
    give_key(computers)
    at_guest = computers.start(GUEST, "join", f"{NETWORK}.1:29400", "--key-file", "key", "--json")
    outcome, joined = (
        at_host.communicate(timeout=PATIENCE)[0],
        at_guest.communicate(timeout=PATIENCE)[0],
    )
    assert (at_host.returncode, at_guest.returncode) == (0, 0), computers.said(
        HOST
    ) + computers.said(GUEST)
    assert json.loads(outcome)["state"] == "finished"
    told = json.loads(joined)
    assert (told["state"], told["host"]) == ("finished", f"{NETWORK}.1:29400")
    assert told["fetched_bytes"] > 29 * 40 * 40 * 3
    assert "both is finished" in told["message"]
    assert not (guest / "runs").exists()
    assert len(list((guest / "cache").glob("bundle-*"))) == 1
    for said in (computers.said(HOST), computers.said(GUEST)):
        assert "Traceback" not in said
        assert "torch.distributed" not in said

    monkeypatch.chdir(host)
    source = json.dumps(str(host / "photos"))
    train("first-run", [*PLAIN, f"data.source={source}"], name="alone")
    assert len(losses("both")) == 12
    assert losses("both") == pytest.approx(losses("alone"), rel=1e-5)


@pytest.mark.slow
def test_an_interrupted_host_tells_its_guest(computers: Computers) -> None:
    at_host = computers.start(HOST, "train", *set_flags(*SMALL), "--machines", "3")
    give_key(computers)
    at_guest = computers.start(GUEST, "join", f"{NETWORK}.1", "--key-file", "key", "--json")
    computers.await_words(HOST, "is ready")
    os.killpg(at_host.pid, signal.SIGINT)
    joined = at_guest.communicate(timeout=PATIENCE)[0]
    assert at_host.wait(PATIENCE) == 130
    assert at_guest.returncode == 0, computers.said(GUEST)
    assert json.loads(joined)["state"] == "stopped"
    assert "Traceback" not in computers.said(HOST) + computers.said(GUEST)


@pytest.mark.slow
def test_a_guest_whose_host_is_killed_says_so_and_goes_on_when_it_is_back(
    computers: Computers, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        *set_flags(*SMALL, "train.steps=100000", "train.checkpoint_every_seconds=1"),
        "--name",
        "both",
    ]
    at_host = computers.start(HOST, "train", *flags, "--machines", "2")
    give_key(computers)
    at_guest = computers.start(GUEST, "join", f"{NETWORK}.1", "--key-file", "key", "--json")
    computers.await_words(HOST, "step 2")
    os.killpg(at_host.pid, signal.SIGKILL)
    computers.await_words(GUEST, "does not answer")
    assert at_guest.poll() is None
    again = computers.start(HOST, "resume", "both", "--machines", "2")
    _until(
        lambda: (
            (computers.folders[HOST] / "runs/both/events.jsonl").read_text().count('"resumed"') == 1
        ),
        lambda: computers.said(HOST) + computers.said(GUEST),
    )
    monkeypatch.chdir(computers.folders[HOST])
    assert lapclip("stop", "both").returncode == 0
    assert json.loads(at_guest.communicate(timeout=PATIENCE)[0])["state"] == "stopped"
    assert (again.wait(PATIENCE), at_guest.returncode) == (0, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["train", "--machines", "1"], "at least 2"),
        (["train", "--machines", "2", "--background"], "background"),
        (["train", "--address", "eth0"], "--machines"),
        (["train", "--machines", "2", "--address", "0.0.0.0"], "not all of them"),
        (["train", "--machines", "2", "--address", "127.0.0.1:x"], "no port"),
        (["join", "desktop:nowhere"], "no HOST:PORT"),
        (["join", "127.0.0.1:9", "--key-file", "missing"], "cannot be read"),
        (["join", "127.0.0.1:9"], "--key-file"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    given: list[str], words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = lapclip(*given, *(set_flags(*SMALL) if given[0] == "train" else []))
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_the_command_that_trains_is_given_all_but_the_invitation() -> None:
    ARGUMENTS.set(
        (
            "train",
            "photos",
            "--machines",
            "2",
            "--address=eth0",
            "--set",
            "a=1",
            "--machines=3",
            "--json",
        )
    )
    assert own_arguments() == ["train", "photos", "--set", "a=1", "--json"]


@pytest.mark.parametrize(
    ("rank", "guest", "right"),
    [(0, False, True), (1, True, True), (1, False, False), (0, True, False)],
)
def test_a_guest_never_writes_and_a_host_never_follows(
    rank: int, guest: bool, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MACHINES, "2")
    if guest:
        plain = build_config([parse_settings(SMALL)], SHAPES)
        monkeypatch.setenv(AGREED, Agreement.on(plain, "0" * 16, "12345678").variables()[AGREED])
    ranks = Ranks()
    ranks.rank, ranks.count = rank, 2
    if right:
        check_place(ranks)
    else:
        with pytest.raises(LostRank):
            check_place(ranks)


@pytest.mark.parametrize(("place", "found"), [("127.0.0.1:29500", 29500), ("localhost", 29400)])
def test_a_place_has_an_address_and_a_port(place: str, found: int) -> None:
    assert split_place(place) == ("127.0.0.1", found)


@pytest.mark.parametrize("place", ["", ":29400", "host:", "host:99999", "host:port"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_place(place)

"""Torch's elastic agent as hosts and guests run it, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lapclip.errors import JoinError, NoAnswer
from lapclip.together import AGENT, STATUS, engine
from lapclip.together.engine import Ended, Meeting, address_of, interface_of, listen, own_address, train_together
from lapclip.together.invitation import Invitation

HERE = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen(HERE, 0) as made:
        yield made


def meeting(listening: socket.socket, machines: int = 1, *, hosts: bool = True) -> Meeting:
    port = listening.getsockname()[1]
    return Meeting("0123456789abcdef", HERE, port, machines, HERE, listening if hosts else None)


def listening_at() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_host_listens_on_the_address_that_was_named_alone() -> None:
    before = listening_at()
    invitation = Invitation("ABCDEFGHIJKLMNOP", {}, [], 2, (HERE, 0))
    with listen(HERE, 0) as listening:
        made = engine._Meeting.create(meeting(listening))
        found = listening_at() - before
        assert len(found) == 2
        assert {address for address, _ in found} == {HERE}
        del made
    invitation.close()


def test_a_process_that_is_done_ends_its_agent(listening: socket.socket, here: Path) -> None:
    rounds: list[int] = []
    ended = train_together(meeting(listening), ["--version"], met=rounds.append)
    assert ended == Ended(0, round=rounds[-1])
    assert len(rounds) == 1


def test_what_starting_again_does_not_change_is_not_started_again(listening: socket.socket, here: Path) -> None:
    rounds: list[int] = []
    assert train_together(meeting(listening), ["model", "no-such-shape"], met=rounds.append).status == 2
    assert len(rounds) == 1


def test_a_process_that_was_killed_is_started_again(
    listening: socket.socket, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LAST_CALL", 1)
    killed_once = "[ -e began ] || { touch began; kill -9 $$; }"
    script = f'{killed_once}; [ -n "$RANK" ] && echo 0 > "${STATUS}"'
    monkeypatch.setattr(engine, "python", lambda *arguments: ["sh", "-c", script])
    rounds: list[int] = []
    assert train_together(meeting(listening), [], met=rounds.append) == Ended(0, round=1)
    assert rounds == [0, 1]


def test_a_process_does_not_outlive_its_agent(here: Path) -> None:
    waits = "import time; from lapclip.together import end_with_agent; end_with_agent(); time.sleep(600)"
    agent = f"""
import os, subprocess, sys
os.environ["{AGENT}"] = str(os.getpid())
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
sys.stdin.read()
"""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", agent, waits], text=True, **pipes) as started:
        assert started.stdout is not None
        worker = psutil.Process(int(started.stdout.readline()))
        started.kill()
    ends = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:  # nobody may be there to wait for it
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_a_guest_does_not_begin_without_the_host(
    listening: socket.socket, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LAST_CALL", 1)
    there = engine._Meeting.create(meeting(listening, 2))  # its store answers, and it does not take part
    ended = train_together(meeting(listening, 2, hosts=False), ["--version"])
    assert ended.status is None
    assert "has not come back" in ended.why
    del there


def test_a_port_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "REACH_SECONDS", 0.0)
    with pytest.raises(NoAnswer, match="port 9"):
        train_together(Meeting("0123456789abcdef", HERE, 9, 2, HERE), ["--version"])


def test_signals_and_variables_are_as_they_were(listening: socket.socket, here: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train_together(meeting(listening), ["--version"], {"LAPCLIP_X": "1"})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not {AGENT, STATUS, "LAPCLIP_X", "GLOO_SOCKET_IFNAME"} & os.environ.keys()


def test_addresses_and_interfaces() -> None:
    interface = interface_of(HERE)
    assert address_of(interface) == address_of(HERE) == own_address(HERE) == HERE
    with pytest.raises(JoinError, match="no address"):
        address_of("198.51.100.7")
    with listen(HERE, 0) as taken, pytest.raises(JoinError, match="cannot be listened on"):
        listen(HERE, taken.getsockname()[1])

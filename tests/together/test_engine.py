"""Torch's elastic agent as hosts and guests run it, with real processes."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from lapclip.errors import JoinError, NoAnswer
from lapclip.together import AGENT, STATUS, engine
from lapclip.together.engine import (
    Ended,
    Meeting,
    SignedBackend,
    address_of,
    interface_of,
    listen,
    own_address,
    train_together,
)
from lapclip.together.invitation import Invitation

HERE = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen(HERE, 0) as made:
        yield made


def meeting(listening: socket.socket, machines: int = 1, *, hosts: bool = True) -> Meeting:
    port = listening.getsockname()[1]
    return Meeting(
        "0123456789abcdef",
        HERE,
        port,
        machines,
        HERE,
        "ABCDEFGHIJKLMNOP",
        listening if hosts else None,
    )


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


class Planted:
    """What a pickle makes of the one who reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


def test_what_agents_meet_by_is_json_that_only_who_knows_the_key_can_change(
    listening: socket.socket, here: Path
) -> None:
    made = engine._Meeting.create(meeting(listening))
    store, run_id = made._shared_tcp_store_server, "0123456789abcdef"
    assert isinstance(store, TCPStore)
    one, two = (SignedBackend(store, run_id, "ABCDEFGHIJKLMNOP") for _ in range(2))
    state, node = _RendezvousState(), _NodeDesc("guest-10.0.0.2", 7, 0)
    state.round, state.deadline = 3, datetime.now(UTC)
    state.participants, state.wait_list = {node: 1}, {node}
    state.last_heartbeats = {node: datetime.now(UTC)}
    written = one.set_state(pickle.dumps(state))
    assert written is not None
    assert written[2]
    found = two.get_state()
    assert found is not None
    assert vars(pickle.loads(found[0])) == vars(state)
    assert b"{" in store.get(f"torch.rendezvous.{run_id}")  # no pickle
    again = two.set_state(pickle.dumps(_RendezvousState()), found[1])
    assert again is not None
    assert again[2]
    late = one.set_state(pickle.dumps(state), written[1])  # somebody was quicker
    assert late is not None
    assert not late[2]

    stranger = SignedBackend(store, run_id, "PONMLKJIHGFEDCBA")
    with pytest.raises(RendezvousStateError):
        stranger.get_state()
    for planted in (b64encode(pickle.dumps(Planted())).decode(), "0" * 64 + ' {"round": 0}', "x"):
        store.set(f"torch.rendezvous.{run_id}", planted)
        with pytest.raises(RendezvousStateError):
            one.get_state()
    assert not Path("planted").exists()


def test_a_process_that_is_done_ends_its_agent(listening: socket.socket, here: Path) -> None:
    rounds: list[int] = []
    ended = train_together(meeting(listening), ["--version"], met=rounds.append)
    assert ended == Ended(0, round=rounds[-1])
    assert len(rounds) == 1


def test_what_starting_again_does_not_change_is_not_started_again(
    listening: socket.socket, here: Path
) -> None:
    rounds: list[int] = []
    assert (
        train_together(meeting(listening), ["model", "no-such-shape"], met=rounds.append).status
        == 2
    )
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
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen([sys.executable, "-c", agent, waits], text=True, **pipes) as started:
        assert started.stdout is not None
        worker = psutil.Process(int(started.stdout.readline()))
        started.kill()
    ends = time.monotonic() + 60
    while (
        worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    ):  # nobody may be there to wait for it
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_a_guest_does_not_begin_without_the_host(
    listening: socket.socket, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LAST_CALL", 1)
    there = engine._Meeting.create(
        meeting(listening, 2)
    )  # its store answers, and it does not take part
    ended = train_together(meeting(listening, 2, hosts=False), ["--version"])
    assert ended.status is None
    assert "has not come back" in ended.why
    del there


def test_a_port_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "REACH_SECONDS", 0.0)
    with pytest.raises(NoAnswer, match="port 9"):
        train_together(
            Meeting("0123456789abcdef", HERE, 9, 2, HERE, "ABCDEFGHIJKLMNOP"), ["--version"]
        )


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

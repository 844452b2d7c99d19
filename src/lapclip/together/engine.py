"""Torch's elastic agent in this process: it starts the process that trains here, meets the agents of the other
computers, and starts its process again when one of them is lost.

Three things differ from what `torchrun` does. What the agents meet by is signed with the key of the run. The host is
always rank 0, which writes the run, because guests come after it in the order of names by which torch numbers them; a
guest does not begin without it. And all that meets at the host meets at one port of one address: torch itself would
listen on every interface, at a port of its choice.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from lapclip.errors import JoinError, NoAnswer, first_line
from lapclip.machine.facts import python
from lapclip.paths import parse_json, temporary_folder
from lapclip.together import AGENT, MACHINES, STATUS

LAST_CALL = 10
"""Seconds that the agents which have met wait for others, when they start again."""
RESTARTS = 1_000_000
"""How often an agent starts its process again: as long as the user lets it."""
STORE_SECONDS = 30
"""How long an agent waits for an answer of the host's store."""
SAVE_SECONDS = 120
"""How long a process that was interrupted may take to save."""
BARRIER_SECONDS = 5.0
"""How long an agent whose process is done waits for the others'."""
REACH_SECONDS = 60.0
"""How long a guest tries to reach the port of the meeting."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class Meeting:
    """Where the agents of one run meet."""

    run_id: str
    address: str
    """The host's."""
    port: int
    machines: int
    local: str
    """This computer's address, in the same network."""
    key: str
    """What all computers of the run know, and nobody else."""
    listening: socket.socket | None = None
    """The port, on the host."""

    @property
    def hosts(self) -> bool:
        return self.listening is not None


@dataclass(frozen=True)
class Ended:
    """How an agent ended: with the exit status of its process, or, where there is none, why it could not go on."""

    status: int | None
    why: str = ""
    interrupted: bool = False
    round: int = 0
    """How often the agents had met."""


Rounds = Callable[[int], None]
"""Called each time that the agents have met, with how often that was."""


def train_together(
    meeting: Meeting,
    arguments: Sequence[str],
    variables: Mapping[str, str] = {},
    met: Rounds = lambda number: None,
) -> Ended:
    """Run `lapclip` with these arguments as one of several ranks, and again each time that a rank is lost."""
    _quiet()
    if not meeting.hosts:
        _reach(meeting)
    with temporary_folder("agent") as folder, _signals_as_they_were():
        status = folder / "status"
        about = {
            STATUS: str(status),
            AGENT: str(os.getpid()),
            MACHINES: str(meeting.machines),
            "GLOO_SOCKET_IFNAME": interface_of(meeting.local),
            **variables,
        }
        with _environment({**about, "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(SIGNALS)}):
            return _run(meeting, arguments, status, met)


def _run(meeting: Meeting, arguments: Sequence[str], status: Path, met: Rounds) -> Ended:
    handler: _Meeting | None = None
    try:
        handler = _Meeting.create(meeting)
        program, *rest = python("-m", "lapclip", *arguments)
        spec = WorkerSpec(
            role="lapclip",
            local_world_size=1,
            rdzv_handler=handler,
            entrypoint=program,
            args=tuple(
                word.replace("$", "$$") for word in rest
            ),  # torch puts numbers in for words such as $local_rank
            max_restarts=RESTARTS,
            monitor_interval=0.2,
            local_addr=meeting.local,
        )
        _Agent(spec, handler, status, met).run()
        return Ended(_read_status(status) or 0, round=handler.round)
    except SignalException as interrupt:
        return Ended(128 + interrupt.sigval, interrupted=True)
    except _Final as final:
        return Ended(final.status)
    except RendezvousConnectionError:
        return Ended(None, "it does not answer")
    except (RendezvousError, DistError, RuntimeError, TimeoutError, OSError) as error:
        return Ended(None, first_line(error))
    finally:
        if handler is not None:
            handler._stop_heartbeats()  # not shutdown(), which would end the meeting for all


class _Final(Exception):
    """The process ended in a way that starting it again does not change."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ended with status {status}")
        self.status = status


class _Agent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, handler: _Meeting, status: Path, met: Rounds) -> None:
        logs = DefaultLogsSpecs(log_dir=str(status.parent))
        super().__init__(
            spec, logs, exit_barrier_timeout=BARRIER_SECONDS, shutdown_timeout=SAVE_SECONDS
        )
        self._meeting, self._status, self._met = handler, status, met

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
        self._met(self._meeting.round)
        self._status.unlink(missing_ok=True)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # What it has said by now it said by itself: where a computer came, it is told to end in the next line.
        status = _read_status(self._status)
        if status is not None:
            raise _Final(status)
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]


class _Meeting(DynamicRendezvousHandler):
    """Torch's rendezvous over the store of the host."""

    place: Meeting

    @classmethod
    def create(cls, place: Meeting) -> _Meeting:
        seconds = timedelta(seconds=STORE_SECONDS)
        at: dict[str, Any] = {
            "host_name": place.address,
            "port": place.port,
            "multi_tenant": True,
            "timeout": seconds,
        }
        if place.listening is None:
            store = TCPStore(**at, is_master=False)
        else:
            store = TCPStore(**at, is_master=True, master_listen_fd=place.listening.dup().detach())
        backend = SignedBackend(store, place.run_id, place.key)
        # Torch numbers computers by the order of these names; an address begins with a digit.
        name = place.local if place.hosts else f"guest-{place.local}"
        timeout = RendezvousTimeout(last_call=timedelta(seconds=LAST_CALL))
        made = cls.from_backend(place.run_id, store, backend, 1, place.machines, name, timeout)
        made.place = place
        # Torch tells it in the first round alone, and a computer that comes later would wait for it in vain.
        made._bootstrap_store_info = RendezvousStoreInfo(place.address, place.port)
        if place.hosts:
            made._shared_tcp_store_server = store
        return made

    @property
    def round(self) -> int:
        """How often the agents have met; the same for all of them."""
        return self._state_holder.state.round

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        """Called on a rank 0 that has no store for the processes: on a guest that met others without the host."""
        raise RendezvousError("the host has not come back yet")


class SignedBackend(C10dRendezvousBackend):
    """Torch's rendezvous keeps its state as a pickle in a store that anybody in the network can write to, and whoever
    reads a pickle runs what is in it. Here the store has JSON and an HMAC over it, with the key of the run; torch is
    given a pickle that this process has made itself."""

    def __init__(self, store: TCPStore, run_id: str, key: str) -> None:
        super().__init__(store, run_id)
        self._secret = hashlib.sha256(f"lapclip rendezvous {run_id} {key}".encode()).digest()

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        body = json.dumps(
            _state_as_json(pickle.loads(state)), sort_keys=True
        )  # made by this process just now
        text = f"{self._proof(body)} {body}"
        before = token.decode() if isinstance(token, bytes) else self._NULL_SENTINEL
        found = self._decode_state(self._call_store("compare_set", self._key, before, text))
        return None if found is None else (*found, found[1] == text.encode())

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        """What the store has: the state as torch takes it, and as it is in the store."""
        if base64_state == self._NULL_SENTINEL.encode():
            return None
        proof, _, body = base64_state.decode("utf-8", "replace").partition(" ")
        if not hmac.compare_digest(self._proof(body).encode(), proof.encode()):
            raise RendezvousStateError(
                "someone without the key has changed what the computers meet by"
            )
        try:
            return pickle.dumps(_state_of_json(parse_json(body))), base64_state
        except (ValueError, TypeError, LookupError) as error:
            raise RendezvousStateError("what the computers meet by cannot be read") from error

    def _proof(self, body: str) -> str:
        return hmac.new(self._secret, body.encode(), hashlib.sha256).hexdigest()


def _state_as_json(state: _RendezvousState) -> dict[str, Any]:
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline and state.deadline.isoformat(),
        "closed": state.closed,
        "participants": sorted(
            [*_node_as_json(node), rank] for node, rank in state.participants.items()
        ),
        "wait_list": sorted(map(_node_as_json, state.wait_list)),
        "redundancy_list": sorted(map(_node_as_json, state.redundancy_list)),
        "last_heartbeats": sorted(
            [*_node_as_json(n), when.isoformat()] for n, when in state.last_heartbeats.items()
        ),
    }


def _state_of_json(told: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = (
        int(told["round"]),
        bool(told["complete"]),
        bool(told["closed"]),
    )
    state.deadline = datetime.fromisoformat(told["deadline"]) if told["deadline"] else None
    state.participants = {_node(*node): int(rank) for *node, rank in told["participants"]}
    state.wait_list = {_node(*node) for node in told["wait_list"]}
    state.redundancy_list = {_node(*node) for node in told["redundancy_list"]}
    state.last_heartbeats = {
        _node(*node): datetime.fromisoformat(when) for *node, when in told["last_heartbeats"]
    }
    return state


def _node_as_json(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(address: str, process: int, number: int) -> _NodeDesc:
    return _NodeDesc(str(address), int(process), int(number))


def _read_status(path: Path) -> int | None:
    """What the process said at its end; None where it could not, or where another rank was lost."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reach(meeting: Meeting) -> None:
    """Try the port of the meeting until it answers: torch's own attempts cannot be interrupted."""
    until = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise NoAnswer(
                    f"{meeting.address} does not answer at port {meeting.port}: {error.strerror or error}.",
                    hint="a firewall there that lets this port through",
                ) from None
        time.sleep(0.5)


def listen(address: str, port: int) -> socket.socket:
    """The port of a meeting on the host, on this address alone."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise JoinError(
            f"{address} cannot be listened on at port {port}, where computers are to meet: {error.strerror or error}.",
            hint=f"--address {address}:{port + 99}; another lapclip may be waiting here",
        ) from None
    return listening


def own_address(towards: str = "192.0.2.1") -> str:
    """This computer's address on the way to another; without one, on the way that the default route takes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            raise JoinError(
                f"This computer has no way to {towards}: {error.strerror or error}.",
                hint="--address names its address",
            ) from None
        return probe.getsockname()[0]


def address_of(name: str) -> str:
    """The address that an interface or a name of this computer stands for."""
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and name in (interface, address.address):
                return address.address
    raise JoinError(
        f"This computer has no address and no interface {name}.",
        hint=", ".join(psutil.net_if_addrs()),
    )


def interface_of(address: str) -> str:
    """The interface that has an address."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return interface
    raise JoinError(f"No interface of this computer has the address {address}.")


def _quiet() -> None:
    """What torch logs of restarts is said in other words, or is no news."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signals_as_they_were() -> Iterator[None]:
    """Torch takes over signals and does not give them back."""
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before: dict[Any, Any] = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError, ValueError):
                signal.signal(number, handler)

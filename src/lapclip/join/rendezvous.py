"""Torch's elastic agent: it starts the process that trains here, and again when another is lost.

Two things differ from `torchrun`. The state of the rendezvous is signed JSON. And the host is
always rank 0: torch orders computers by name, and a guest does not begin without its host.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any, cast

import psutil
from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
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
from lapclip.join.agreement import MACHINES
from lapclip.join.key import is_signed, sign
from lapclip.machine.facts import python
from lapclip.paths import parse_json, temporary_folder

LAST_CALL_SECONDS = 10  # for which computers that have met wait for others
STORE_SECONDS = 30
SAVE_SECONDS = 120  # for a process that was interrupted
EXIT_SECONDS = 5.0  # for which an agent waits for the others at the end
MAX_RESTARTS = 20
USER_ERROR = 2  # exit status of errors that a restart does not change


@dataclass(frozen=True)
class MeetingPoint:
    """Where the agents of one run meet."""

    run_id: str
    machines: int
    address: str
    """Address of the host."""
    port: int
    key: str
    interface: str
    own_address: str
    listening: socket.socket | None = None
    """Socket at the port, on the host. None on guests."""


def train_with_others(
    point: MeetingPoint, arguments: Sequence[str], variables: Mapping[str, str]
) -> int:
    """Run `lapclip` with these arguments as one of several ranks. Returns its exit status."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    own = {
        MACHINES: str(point.machines),
        "GLOO_SOCKET_IFNAME": point.interface,
    }
    os.environ.update({**own, **variables})
    handler = None
    with temporary_folder("agent") as folder:
        try:
            handler = HostFirstRendezvous.create(point)
            program, *rest = python("-m", "lapclip", *arguments)
            # Torch replaces words such as $local_rank.
            escaped = tuple(word.replace("$", "$$") for word in rest)
            spec = WorkerSpec(
                role="lapclip",
                local_world_size=1,
                rdzv_handler=handler,
                entrypoint=program,
                args=escaped,
                max_restarts=MAX_RESTARTS,
                monitor_interval=0.2,
                local_addr=point.own_address,
            )
            agent = Agent(
                spec,
                DefaultLogsSpecs(log_dir=str(folder)),
                exit_barrier_timeout=EXIT_SECONDS,
                shutdown_timeout=SAVE_SECONDS,
            )
            result = cast(RunResult, agent.run())
        except SignalException as interrupt:
            return 128 + interrupt.sigval
        except (RendezvousError, DistError, RuntimeError, TimeoutError, OSError) as error:
            reason = first_line(error).rstrip(".")
            raise NoAnswer(
                f"The computers cannot meet: {reason}.",
                hint="lapclip resume --machines on the host, lapclip join on the others",
            ) from None
        finally:
            if handler is not None:
                handler._stop_heartbeats()  # `shutdown` would end the meeting for all
    return max((failure.exitcode for failure in result.failures.values()), default=0)


class Agent(LocalElasticAgent):
    """Torch's agent, which gives up where a restart changes nothing."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        for failure in result.failures.values():
            message = failure.error_file_data["message"]
            details = message.get("extraInfo") if isinstance(message, dict) else None
            can_help = bool(details) and details.get("is_worth_a_restart") is True
            if failure.exitcode == USER_ERROR and not can_help:
                self._remaining_restarts = 0
        return result


class HostFirstRendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous over the store of the host, which is rank 0 in every round."""

    is_host = False

    @classmethod
    def create(cls, point: MeetingPoint) -> HostFirstRendezvous:
        """Return the rendezvous of a run. The host starts its store."""
        place: dict[str, Any] = {
            "host_name": point.address,
            "port": point.port,
            "multi_tenant": True,
            "timeout": timedelta(seconds=STORE_SECONDS),
        }
        if point.listening is None:
            store = TCPStore(**place, is_master=False)
            name = f"guest-{point.own_address}"  # sorts after any address
        else:
            listening = point.listening.dup().detach()
            store = TCPStore(**place, is_master=True, master_listen_fd=listening)
            name = point.own_address
        backend = SignedBackend(store, point.run_id, point.key)
        timeout = RendezvousTimeout(last_call=timedelta(seconds=LAST_CALL_SECONDS))
        handler = cls.from_backend(point.run_id, store, backend, 1, point.machines, name, timeout)
        handler.is_host = point.listening is not None
        # Processes use this store too, so that all meet at one port of one address.
        handler._bootstrap_store_info = RendezvousStoreInfo(point.address, point.port)
        handler._shared_tcp_store_server = store
        return handler

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others. A guest that met nobody before the host came back tries again."""
        info = super().next_rendezvous()
        while (info.rank == 0) != self.is_host:
            info = super().next_rendezvous()
        return info


class SignedBackend(C10dRendezvousBackend):
    """Keeps the state of the rendezvous in the store as signed JSON.

    Torch keeps a pickle there, and whoever reads a pickle runs what is in it. Anybody in the
    network can write to the store. Torch receives a pickle that this process has made itself.
    """

    def __init__(self, store: TCPStore, run_id: str, key: str) -> None:
        super().__init__(store, run_id)
        self._sign_key = key

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        values = _state_to_json(pickle.loads(state))  # made by this process
        body = json.dumps(values, sort_keys=True)
        text = f"{sign(self._sign_key, self._key, body)} {body}"
        before = token.decode() if isinstance(token, bytes) else self._NULL_SENTINEL
        stored = self._call_store("compare_set", self._key, before, text)
        decoded = self._decode_state(stored)
        return None if decoded is None else (*decoded, stored == text.encode())

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        """Return the state as torch expects it, and as it is stored."""
        if base64_state == self._NULL_SENTINEL.encode():
            return None
        signature, _, body = base64_state.decode("utf-8", "replace").partition(" ")
        if not is_signed(signature, self._sign_key, self._key, body):
            raise RendezvousStateError("the rendezvous was changed by somebody without the key")
        try:
            return pickle.dumps(_state_from_json(parse_json(body))), base64_state
        except (ValueError, TypeError, LookupError) as error:
            raise RendezvousStateError("the rendezvous cannot be read") from error


def _state_to_json(state: _RendezvousState) -> dict[str, Any]:
    heartbeats = state.last_heartbeats.items()
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline.isoformat() if state.deadline else None,
        "closed": state.closed,
        "participants": sorted([*astuple(node), rank] for node, rank in state.participants.items()),
        "wait_list": sorted(map(astuple, state.wait_list)),
        "redundancy_list": sorted(map(astuple, state.redundancy_list)),
        "last_heartbeats": sorted([*astuple(node), when.isoformat()] for node, when in heartbeats),
    }


def _state_from_json(values: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete = int(values["round"]), values["complete"] is True
    state.closed = values["closed"] is True
    deadline = values["deadline"]
    state.deadline = datetime.fromisoformat(deadline) if deadline else None
    state.participants = {_node(*node): int(rank) for *node, rank in values["participants"]}
    state.wait_list = {_node(*node) for node in values["wait_list"]}
    state.redundancy_list = {_node(*node) for node in values["redundancy_list"]}
    for *node, when in values["last_heartbeats"]:
        state.last_heartbeats[_node(*node)] = datetime.fromisoformat(when)
    return state


def _node(address: str, process: int, number: int) -> _NodeDesc:
    return _NodeDesc(str(address), int(process), int(number))


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone."""
    listening = socket.socket()
    try:
        listening.bind((address, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise JoinError(
            f"{address} cannot be listened on at port {port}: {error.strerror or error}.",
            hint="another lapclip may be waiting here",
        ) from None
    return listening


def own_interface(towards: str = "192.0.2.1") -> tuple[str, str]:
    """Return the network interface on the way to a computer, and its address.

    By default that of the default route. GLOO_SOCKET_IFNAME names another, as for torch itself.
    """
    wanted, on_the_way = os.environ.get("GLOO_SOCKET_IFNAME"), ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((towards, 9))  # sends nothing
        on_the_way = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            is_wanted = name == wanted if wanted else address.address == on_the_way
            if is_wanted and address.family == socket.AF_INET:
                return name, address.address
    raise JoinError(
        f"This computer has no route to {towards}.",
        hint="GLOO_SOCKET_IFNAME set to the interface of the network",
    )

"""The rendezvous is signed JSON: a pickle in torch's store is never read."""

from __future__ import annotations

import pickle
import socket
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from lapclip.errors import JoinError
from lapclip.join.key import sign
from lapclip.join.rendezvous import SignedBackend, listen, own_interface

KEY = "ABCDEFGHIJKLMNOP"


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True)


def test_a_state_is_read_as_it_was_written(store: TCPStore) -> None:
    node, other = _NodeDesc("10.0.0.1", 5, 0), _NodeDesc("guest-10.0.0.2", 6, 0)
    state, now = _RendezvousState(), datetime.now(UTC)
    state.round, state.complete, state.deadline = 3, True, now
    state.participants, state.wait_list = {node: 0}, {other}
    state.last_heartbeats = {node: now, other: now}
    written = SignedBackend(store, "run", KEY).set_state(pickle.dumps(state))
    assert written
    assert written[2]
    read = SignedBackend(store, "run", KEY).get_state()
    assert read
    assert vars(pickle.loads(read[0])) == vars(state)
    # Somebody who has not read this state cannot replace it.
    late = SignedBackend(store, "run", KEY).set_state(pickle.dumps(_RendezvousState()))
    assert late
    assert not late[2]


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_others_write_is_refused_and_never_unpickled(store: TCPStore, tmp_path: Path) -> None:
    backend = SignedBackend(store, "run", KEY)
    attack = b64encode(pickle.dumps(Attack(tmp_path / "attacked"))).decode()
    signed = sign(KEY, backend._key, "[]")
    for text in (attack, f"{signed} {attack}", f"{sign('other', backend._key, '{}')} {{}}"):
        store.set(backend._key, text)
        with pytest.raises(RendezvousStateError, match="without the key"):
            backend.get_state()
    store.set(backend._key, f"{signed} []")
    with pytest.raises(RendezvousStateError, match="cannot be read"):
        backend.get_state()
    assert not (tmp_path / "attacked").exists()


def test_an_address_of_this_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    name, address = own_interface("127.0.0.1")
    assert address == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert own_interface() == (name, address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(JoinError, match="no route"):
        own_interface()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(JoinError, match=f"at port {port}"):
            listen("127.0.0.1", port)

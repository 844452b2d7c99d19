"""Requests to a host's server, over real connections: who does not know the key learns nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest

from lapclip.errors import JoinError, NoAnswer, WrongKey
from lapclip.join import client as client_module
from lapclip.join.client import HostClient
from lapclip.join.key import format_key, new_key, parse_key, sign
from lapclip.join.send_data import SentFile
from lapclip.join.server import (
    MAX_CONNECTIONS,
    NONCE,
    OFFER,
    READY,
    READY_SECONDS,
    REQUEST,
    SIGNATURE,
    HostServer,
)

KEY, OTHER_KEY = "ABCDEFGHIJKLMNOP", "ABCDEFGHIJKLMNOQ"
CONTENT = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
HERE = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[HostServer]:
    files = [SentFile(CONTENT)]
    made = HostServer(
        (HERE, 0), KEY, {"secret": "photos"}, lambda number, *ends: files[number].read(*ends)
    )
    yield made
    made.shutdown()
    made.server_close()


def client(server: HostServer, key: str = KEY) -> HostClient:
    return HostClient(HERE, int(server.server_address[1]), key)


def send(server: HostServer, path: str, *, signed_path: str = "", method: str = "POST") -> int:
    """Send a request by hand and return its status."""
    connection = HTTPConnection(HERE, int(server.server_address[1]), timeout=30)
    signature = sign(KEY, REQUEST, signed_path or path, "nonce")
    connection.request(method, path, headers={NONCE: "nonce", SIGNATURE: signature})
    return connection.getresponse().status


def test_a_guest_with_the_key_reads_the_offer_and_the_data(server: HostServer) -> None:
    guest = client(server)
    assert guest.get_json(OFFER) == {"secret": "photos"}
    assert guest.read(0, 10, 4000) == CONTENT[10:4000].tobytes()
    for name in ("one", "two", "one"):
        assert guest.get_json(f"{READY}/{name}")["is_training"] is False
    assert server.count_ready() == 2
    server.ready["one"] -= READY_SECONDS + 1  # it has gone
    assert server.count_ready() == 1
    server.is_training = True
    assert guest.get_json(f"{READY}/two")["is_training"] is True


@pytest.mark.parametrize("path", [OFFER, READY, "/files/0/0/10"])
def test_a_wrong_key_is_refused(server: HostServer, path: str) -> None:
    with pytest.raises(WrongKey):
        client(server, OTHER_KEY).request(path)
    assert not server.ready


@pytest.mark.parametrize(
    ("path", "changes", "status"),
    [
        ("/files/0/0/10", {"signed_path": OFFER}, 403),
        ("/files/0/0/10", {"method": "GET"}, 501),
        ("/files/1/0/10", {}, 404),
        ("/files/0/0/5001", {}, 404),
        ("/files/0/-5/10", {}, 404),
        ("/files/0/10/10", {}, 404),
        ("/files/x/0/10", {}, 404),
        ("/files/0/0/" + "9" * 5000, {}, 404),
        ("/files/../offer/0", {}, 404),
        ("/etc/passwd", {}, 404),
    ],
)
def test_what_is_not_offered_or_not_signed_is_refused(
    server: HostServer, path: str, changes: dict[str, Any], status: int
) -> None:
    assert send(server, path, **changes) == status


def wait_until_refused(guest: HostClient) -> None:
    """Send requests until all idle connections are accepted, and one is refused."""
    for _ in range(100):
        try:
            guest.get_json(OFFER)
        except NoAnswer:
            return
    pytest.fail("no connection was refused")


def test_idle_connections_of_one_address_are_limited(server: HostServer) -> None:
    place = (HERE, int(server.server_address[1]))
    idle = [socket.create_connection(place) for _ in range(MAX_CONNECTIONS)]
    try:
        wait_until_refused(client(server))
    finally:
        for connection in idle:
            connection.close()


def test_an_answer_of_somebody_without_the_key_is_refused(
    server: HostServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = client(server)
    monkeypatch.setattr(server, "key", OTHER_KEY)
    monkeypatch.setattr("lapclip.join.server.is_signed", lambda *_: True)
    with pytest.raises(JoinError, match="is not the host"):
        guest.get_json(OFFER)


def test_an_answer_without_end_is_not_read(
    server: HostServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_BYTES", 1000)
    with pytest.raises(NoAnswer):
        client(server).read(0, 0, 4000)


def test_the_key_never_travels() -> None:
    with socket.create_server((HERE, 0)) as listening:
        guest = HostClient(HERE, listening.getsockname()[1], KEY)
        with ThreadPoolExecutor(1) as background:
            answer = background.submit(guest.get_json, OFFER)
            connection, _ = listening.accept()
            with connection:
                received = connection.recv(65536).decode()
            with pytest.raises(NoAnswer):
                answer.result()
    assert SIGNATURE.lower() in received.lower()
    for text in (KEY, format_key(KEY), KEY.lower()):
        assert text not in received


def test_a_key_can_be_typed_as_it_is_shown() -> None:
    key = new_key()
    assert key != new_key()
    assert parse_key(format_key(key).lower().replace(" ", "-")) == key


@pytest.mark.parametrize("text", ["", "ABCD", KEY + "A", KEY[:-1] + "1"])
def test_other_texts_are_no_key(text: str) -> None:
    with pytest.raises(JoinError, match="not a key"):
        parse_key(text)

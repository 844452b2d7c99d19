"""Connections over which nothing whole is asked: they end, and a page stays within reach of others."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lapclip.web import security

from ..conftest import wait_until
from ..served import Served, ending, start

SECONDS = 0.5
MOST = 40


@contextmanager
def limited(seconds: float) -> Iterator[Served]:
    """Serve with so many seconds to send a request, and with room for few connections."""
    program = (
        "import sys; from lapclip.web import security; from lapclip.watch.web import serve; "
        f"security.SECONDS_TO_ASK = {seconds}; security.Connection.most = {MOST}; sys.exit(serve([], port=0))"
    )
    with ending(start([sys.executable, "-c", program])) as found:
        yield found


@pytest.fixture
def served(here: Path) -> Iterator[Served]:
    with limited(SECONDS) as found:
        yield found


def connected(served: Served, sent: bytes, stack: ExitStack) -> socket.socket:
    raw = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=30))
    raw.sendall(sent)
    return raw


def is_closed(raw: socket.socket) -> bool:
    """Waits for an end, or for an answer."""
    try:
        return raw.recv(1) == b""
    except ConnectionError:
        return True


def test_half_sent_requests_do_not_shut_others_out(here: Path) -> None:
    with limited(600) as served, ExitStack() as stack:
        halves = [connected(served, b"GET / HTTP/1.1\r\nHost: 127", stack) for _ in range(150)]
        assert served.ask("/runs").status == 200  # else it waits for 600 seconds
        assert all(is_closed(half) for half in halves[: 150 - MOST])


def test_half_sent_requests_are_closed_when_their_time_is_over(served: Served) -> None:
    with ExitStack() as stack:
        halves = [connected(served, b"GET / HTTP/1.1\r\nHost: 127", stack) for _ in range(3)]
        assert all(is_closed(half) for half in halves)  # else recv times out


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /asked HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n",  # refused, and never sent
    ],
)
def test_a_byte_now_and_then_is_no_request(served: Served, sent: bytes) -> None:
    with ExitStack() as stack:
        raw, began = connected(served, sent, stack), time.monotonic()
        raw.settimeout(SECONDS / 4)
        while time.monotonic() - began < SECONDS + 60:
            try:
                raw.sendall(b"G")
                if raw.recv(4096) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - began < SECONDS + 60


@contextmanager
def answering(content: bytes, connections_at_most: int = 3) -> Iterator[tuple[int, uvicorn.Server]]:
    """A server here, of which each request gets the same answer; its port and itself."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    class Limited(security.Connection):
        most = connections_at_most

    config = uvicorn.Config(
        app, port=0, log_level="error", lifespan="off", ws="none", http=Limited, loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(10)


def asking(port: int, ending: bytes, stack: ExitStack) -> socket.socket:
    """Someone who asks and does not read."""
    raw = stack.enter_context(socket.socket())
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", port))
    raw.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: %s\r\n\r\n" % ending)
    return raw


@pytest.mark.parametrize("ending", [b"close", b"keep-alive"])
def test_answers_that_nobody_reads_are_let_go(
    monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    monkeypatch.setattr(security, "SECONDS_TO_READ", 0.3)
    with answering(b"x" * 20_000_000) as (port, server), ExitStack() as stack:
        asking(port, ending, stack)
        wait_until(lambda: server.server_state.total_requests == 1)
        wait_until(lambda: not server.server_state.connections)


def test_slow_readers_get_all_of_their_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "SECONDS_TO_READ", 0.4)
    monkeypatch.setattr(security, "LEAST_READ", 1000)
    with answering(b"x" * 20_000_000) as (port, _), ExitStack() as stack:
        raw, got = asking(port, b"close", stack), 0
        while piece := raw.recv(500_000):
            got += len(piece)
            time.sleep(len(piece) / 25_000_000)
        assert got > 20_000_000


def test_unread_answers_make_room_for_others() -> None:
    with answering(b"x" * 20_000_000) as (port, server), ExitStack() as stack:
        for _ in range(8):
            asking(port, b"close", stack)
        wait_until(lambda: len(server.server_state.connections) == 3)


def test_answers_that_wait_to_be_read_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "MOST_UNREAD", 45_000_000)
    with (
        answering(b"x" * 20_000_000, connections_at_most=100) as (port, server),
        ExitStack() as stack,
    ):
        readers = []
        for number in range(8):
            readers.append(asking(port, b"keep-alive", stack))
            wait_until(lambda number=number: server.server_state.total_requests > number)
        wait_until(lambda: len(server.server_state.connections) == 2)
        got = 0
        while got < 20_000_000 and (piece := readers[-1].recv(500_000)):
            got += len(piece)
        assert got > 20_000_000


def test_streams_are_no_idle_connections(served: Served) -> None:
    ask = f"GET /runs/later/events?token={served.token} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode()
    with ExitStack() as stack:
        stream = connected(served, ask, stack)  # it waits for a run that may begin
        for _ in range(MOST + 10):
            connected(served, b"GET", stack)
        stream.settimeout(SECONDS + 0.5)
        with pytest.raises(TimeoutError):
            stream.recv(1)
        assert served.ask("/runs").status == 200

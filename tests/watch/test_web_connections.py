"""Connections over which nothing whole is asked: they end, and a page stays within reach of others."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ..served import Served, ending, start

SECONDS = 1.0
MOST = 40


@pytest.fixture
def served(here: Path) -> Iterator[Served]:
    """With short deadlines, and room for few."""
    program = (
        "import sys; from lapclip.web import connections; from lapclip.watch.web import serve; "
        f"connections.SECONDS_TO_ASK = {SECONDS}; connections.Connection.most = {MOST}; sys.exit(serve([], port=0))"
    )
    with ending(start([sys.executable, "-c", program])) as found:
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


def test_half_sent_requests_do_not_shut_others_out(served: Served) -> None:
    with ExitStack() as stack:
        halves = [connected(served, b"GET / HTTP/1.1\r\nHost: 127", stack) for _ in range(150)]
        began = time.monotonic()
        assert served.ask("/runs").status == 200
        assert time.monotonic() - began < SECONDS
        assert all(is_closed(half) for half in halves)  # the oldest at once, the others when their time is over
        assert time.monotonic() - began < SECONDS + 5


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
        while time.monotonic() - began < SECONDS + 5:
            try:
                raw.sendall(b"G")
                if raw.recv(4096) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - began < SECONDS + 4


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

"""Somebody between a guest and a host, who listens, changes what passes, or breaks it off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Change = Callable[[bytes], bytes | None]
"""What becomes of bytes from the host; None breaks the connection off."""


class Relay:
    """Passes connections on to a port of this computer. `heard` is all that passed, both ways."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self.change: Change = lambda piece: piece
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                guest, _ = self._listening.accept()
                host = socket.create_connection(("127.0.0.1", self._to))
                threading.Thread(
                    target=self._pass, args=(guest, host, lambda piece: piece), daemon=True
                ).start()
                threading.Thread(
                    target=self._pass, args=(host, guest, self.change), daemon=True
                ).start()

    def _pass(self, source: socket.socket, target: socket.socket, change: Change) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                self.heard += piece
                changed = change(piece)
                if changed is None:
                    break
                target.sendall(changed)
        for end in (target, source) if change(b"") is None else (target,):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR if end is source else socket.SHUT_WR)


@contextmanager
def relayed(port: int) -> Iterator[Relay]:
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()

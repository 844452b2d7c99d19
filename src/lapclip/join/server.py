"""Server of a host: what it offers, and the data.

Requests are signed over their path and a nonce, answers over the nonce and their content. A
recorded request returns what was recorded with it, and adds no guest. Nothing is encrypted.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from lapclip.join.key import is_signed, sign

OFFER, READY = "/offer", "/ready"
NONCE, SIGNATURE = "X-Lapclip-Nonce", "X-Lapclip-Signature"
REQUEST, ANSWER = "join request", "join answer"  # purposes of signatures
TIMEOUT_SECONDS = 15.0
READY_SECONDS = 5.0  # for which a guest counts that said it is ready
MAX_CONNECTIONS = 8  # of one address


class HostServer(ThreadingHTTPServer):
    """Answers guests in threads, on one address of this computer."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        place: tuple[str, int],
        key: str,
        offer: dict[str, Any],
        read: Callable[[int, int, int], bytes],
    ) -> None:
        """Start to answer. `read` returns a range of a file, or raises an error of lookup."""
        self.key, self.offer, self.read = key, offer, read
        self.is_training = False
        self.ready: dict[str, float] = {}
        """When each guest last said that it has the data, by the name that it drew."""
        self._connections: Counter[str] = Counter()
        self._lock = threading.Lock()
        super().__init__(place, RequestHandler)
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def count_ready(self) -> int:
        """Return how many guests have the data and wait: each says so again and again."""
        since = time.monotonic() - READY_SECONDS
        return sum(when >= since for when in list(self.ready.values()))

    def server_bind(self) -> None:
        # HTTPServer would look up the name of the address, which is slow without a name server.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        address = client_address[0]
        with self._lock:
            is_allowed = self._connections[address] < MAX_CONNECTIONS
            self._connections[address] += is_allowed
        if is_allowed:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        super().process_request_thread(request, client_address)
        with self._lock:
            self._connections[client_address[0]] -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore guests that break off."""


class RequestHandler(BaseHTTPRequestHandler):
    """One request. Each has a connection of its own."""

    timeout = TIMEOUT_SECONDS
    server_version, sys_version = "lapclip", ""

    def do_POST(self) -> None:
        host = cast(HostServer, self.server)
        nonce = self.headers.get(NONCE, "")
        signature = self.headers.get(SIGNATURE, "")
        status, content = 403, b""
        if is_signed(signature, host.key, REQUEST, self.path, nonce):
            status, content = self._content(host)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status != 403:
            self.send_header(SIGNATURE, sign(host.key, ANSWER, nonce, content))
        self.end_headers()
        self.wfile.write(content)

    def _content(self, host: HostServer) -> tuple[int, bytes]:
        """Return the status and the content of an answer."""
        match self.path.split("/"):
            case ["", "offer"]:
                return 200, json.dumps(host.offer).encode()
            case ["", "ready", name]:
                host.ready[name] = time.monotonic()
                message = {"is_training": host.is_training, "time": time.time()}
                return 200, json.dumps(message).encode()
            case ["", "files", number, first, last]:
                try:
                    return 200, host.read(int(number), int(first), int(last))
                except (LookupError, ValueError):
                    return 404, b""
        return 404, b""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

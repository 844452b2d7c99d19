"""A web server that speaks as much of the hub's language as is needed: honest, slow, broken or lying, as a test wants it. No torch."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapclip.weights.published_models import PublishedModel

WEIGHTS = "open_clip_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Server:
    """What the server has, how it behaves, and what it was asked for."""

    folder: Path
    parameters: int
    asked: list[str] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    """Bytes of the next answers with weights after which the line breaks; each is used once."""
    status: list[int] = field(default_factory=list)
    """Statuses of the next answers with weights, in place of them."""
    listing: dict[str, Any] = field(default_factory=dict)
    """What is announced of the weights, where that is not the truth."""
    says_digests: bool = True
    """In its listing."""
    page: bool = False
    redirect: str = ""
    delay: float = 0.0
    ranges: bool = True
    address: str = ""

    def models(self) -> dict[str, PublishedModel]:
        return {
            name: PublishedModel(name, "someone/small", self.parameters, 1.0, "MIT")
            for name in ("small-hub", "small-again")
        }


def handler(server: Server) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            span = self.headers.get("Range", "")
            server.asked.append(f"{self.command} {self.path} {span}".strip())
            path = self.path.partition("?")[0]
            if path == "/api/models/someone/small":
                self._answer(
                    json.dumps(
                        {"id": "someone/small", "sha": COMMIT, "siblings": self._siblings()}
                    ).encode()
                )
            elif path.startswith(("/someone/small/resolve/", "/elsewhere/")):
                content = (server.folder / path.rpartition("/")[2]).read_bytes()
                if path.endswith(WEIGHTS):
                    self._weights(content, redirects=path.startswith("/someone"))
                else:
                    self._answer(content)
            else:
                self._plain(404)

        def _siblings(self) -> list[dict[str, Any]]:
            found = []
            for path in server.folder.iterdir():
                content, about = path.read_bytes(), {"rfilename": path.name}
                if server.says_digests:
                    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
                    about |= {"size": len(content), "blobId": blob}
                    if path.name == WEIGHTS:
                        stored = {
                            "sha256": hashlib.sha256(content).hexdigest(),
                            "size": len(content),
                            "pointerSize": 1,
                        }
                        about |= {"lfs": {**stored, **server.listing}}
                found.append(about)
            return found

        def _weights(self, body: bytes, *, redirects: bool = False) -> None:
            if self.command == "GET" and server.status:
                self._plain(server.status.pop(0))
            elif redirects and server.redirect and self.command == "GET":
                self.send_response(302)
                self.send_header("Location", server.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif server.page:
                self._answer(b"<html>log in first</html>", kind="text/html; charset=utf-8")
            else:
                self._answer(
                    body, cut=server.cut.pop(0) if server.cut and self.command == "GET" else None
                )

        def _answer(
            self, body: bytes, kind: str = "application/octet-stream", cut: int | None = None
        ) -> None:
            start = 0
            if server.ranges and (
                found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            ):
                start = int(found[1])
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.send_header("Content-Type", kind)
            self.end_headers()
            if self.command == "HEAD":
                return
            sent = body[start:] if cut is None else body[start : start + cut]
            with suppress(ConnectionError):  # whoever asked may have gone away
                for at in range(0, len(sent), 1 << 20):
                    time.sleep(server.delay)
                    self.wfile.write(sent[at : at + (1 << 20)])
                if cut is not None:
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True

        def _plain(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """The server at work, at an address of this computer."""
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
    threading.Thread(
        target=http_server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    server.address = f"http://127.0.0.1:{http_server.server_port}"
    yield server
    http_server.shutdown()
    http_server.server_close()

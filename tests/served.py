"""A real server of ours in a process of its own, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        found = re.fullmatch(r"http://([^/]+):(\d+)/\?token=([^#]+)(?:#(.+))?", address)
        assert found, address
        self.host, self.port, self.token, self.fragment = (
            found[1],
            int(found[2]),
            found[3],
            found[4],
        )

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> http.client.HTTPResponse:
        """The answer to exactly this path: nothing tidies it up on the way. With a body it is sent there. Whoever asks
        has the cookie, unless other ones are given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest("GET" if body is None else "POST", path, skip_host="Host" in headers)
        named = re.search(r":(\d+)$", headers.get("Host", f":{self.port}"))
        cookie = f"lapclip_{named[1] if named else 80}={self.token}"
        for name, value in {"Cookie": cookie, **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse()

    def json(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, answer.read()
        return json.loads(answer.read(), parse_constant=refuse)

    def messages(self, path: str, **headers: str) -> Iterator[tuple[str, Any]]:
        """Server-sent messages as (kind, value)."""
        answer = self.ask(path, None, **headers)
        assert answer.status == 200, answer.read()
        kind = "message"
        for line in answer:
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                kind = text.removeprefix("event: ")
            elif text.startswith("data: "):
                yield kind, json.loads(text.removeprefix("data: "), parse_constant=refuse)
                kind = "message"


def start(arguments: Sequence[str], **environment: str) -> Served:
    """Start a server, and wait until it says its address."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    assert process.stdout
    said = ""
    while line := process.stdout.readline():
        said += line
        if line.startswith("Ctrl-C") and (found := re.search(r"http://\S+", said)):
            return Served(process, found.group())
    raise AssertionError(f"the server gave no address: {said}")


@contextmanager
def ending(served: Served) -> Iterator[Served]:
    """Nothing may have gone wrong in it: what does is printed."""
    try:
        yield served
    finally:
        served.process.kill()
        said, _ = served.process.communicate()
    assert "Traceback" not in said, said


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")

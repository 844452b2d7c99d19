"""Who may ask, how much, and until when: what every request passes before it reaches a dialect.

Clients are programs, so an API key stands where the pages of `watch` and `search` have a token: in the header
`Authorization: Bearer KEY` or `X-API-Key`. The page at `/` is for people, and its address carries a token of its own.
Without a key the server listens on this computer alone, and then everybody here may ask; a page on the web may not
(Host and Origin are checked, as `lapclip.web.security` says).

A request is read whole before anything is done for it, within a time and a number of bytes. Whoever goes away before
the answer is not computed for any further.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lapclip.serving.dialects import REFUSED, answer_refusal
from lapclip.serving.refusals import Forbidden, Late, NoKey, Refusal, TooLarge, Unavailable
from lapclip.serving.service import ARRIVED, Service
from lapclip.text import size
from lapclip.web.security import HEADERS, LONGEST_PATH, Door, let_in

OPEN = ("/health", "/ready", "/ping")
"""Paths that tell whether the server works, and with which model: load balancers have no key."""
LARGEST_WITHOUT_NEED = 10_000
"""Bytes of a request that needs none."""
MOST_ELEMENTS = 300_000
"""Commas and brackets of a request in JSON: each may become an object of Python."""
MODEL_HEADER = "X-Lapclip-Model"


class Gate:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        door: Door,
        key: str | None,
        open_paths: Iterable[str] = OPEN,
    ) -> None:
        self._app, self._service, self._door, self._key = app, service, door, key
        self._open = frozenset(open_paths)
        self.limits = service.limits
        self.bytes = 0
        """Of all requests that are being read or answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, started, body = time.monotonic(), False, None
        ARRIVED.set(began)

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.setdefault(MODEL_HEADER, self._service.model.fingerprint)
                headers.setdefault("Cache-Control", "no-store")
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                self._count(scope, message["status"], time.monotonic() - began)
            await send(message)

        try:
            self._check(scope)
            if self._door.opens(scope):
                await let_in(self._door, Headers(scope=scope))(scope, receive, send_with_headers)
                return
            with BodyRoom(self, scope) as room:
                body = await self._read(receive, room)
                check_elements(scope, body)
                self._service.metrics.phase("read", time.monotonic() - began)
                if scope["method"] == "POST":
                    self._service.check_room()  # before anything is made of it: refusing must cost little
                await self._answer(scope, body, receive, send_with_headers)
        except Refusal as refusal:
            if not started:
                answer = answer_refusal(scope, refusal)
                if body is None:
                    answer.headers["Connection"] = "close"  # the request was not read to its end
                await answer(scope, receive, send_with_headers)
        except (
            Exception
        ) as error:  # the application has answered 500; of what was asked nothing is written down
            log_fault(error)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        """By the path of a route: what was asked stays out of the metrics."""
        route = scope.get("route")
        self._service.metrics.answered(
            getattr(route, "path", "other"), scope["method"], status, seconds
        )
        if (code := scope.get(REFUSED)) is not None:
            self._service.metrics.refused(code)

    def _check(self, scope: Scope) -> None:
        """Raise where a request may not come in."""
        headers = Headers(scope=scope)
        if (refused := self._door.foreign(scope, headers)) is not None:
            raise Forbidden(refused)
        if len(scope["path"]) > LONGEST_PATH:
            raise Refusal("No address here is that long.")
        if self._service.draining and scope["path"] not in OPEN:
            raise Unavailable("The server is ending.")
        if self._key is None or scope["path"] in self._open:
            return
        if not (self._has_key(headers) or self._door.has_token(scope, headers)):
            raise NoKey(
                "The API key is missing or wrong.",
                hint="the header `Authorization: Bearer KEY`, or `X-API-Key: KEY`",
            )

    def _has_key(self, headers: Headers) -> bool:
        given = [headers.get("x-api-key", "")]
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given.append(key.strip())
        assert self._key is not None
        return any(
            secrets.compare_digest(text.encode("utf-8", "replace"), self._key.encode())
            for text in given
        )

    async def _read(self, receive: Receive, room: BodyRoom) -> bytes:
        """The whole body. Slow senders are cut off."""
        chunks: list[bytes] = []
        total = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Unavailable("The caller went away.")
                    chunks.append(message.get("body", b""))
                    total += len(chunks[-1])
                    room.count(total)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise Late(
                f"The request was not sent completely within {self.limits.body_seconds:.0f} seconds."
            ) from None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Have the application answer; give that up when the caller goes away."""
        given = False

        async def receive_body() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # the end of the connection cancels us
            raise AssertionError("unreachable")

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answering = asyncio.ensure_future(self._app(scope, receive_body, send))
        watching = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not answering.done():
                answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering


def log_fault(error: Exception) -> None:
    """One line on a fault of ours: its kind and where it happened."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    print(
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} fault: {type(error).__name__} at {where}",
        file=sys.stderr,
        flush=True,
    )


def check_elements(scope: Scope, body: bytes) -> None:
    """Refuse JSON of so many elements that reading it would take gigabytes; an image is one element."""
    if (
        len(body) < MOST_ELEMENTS
        or "json" not in Headers(scope=scope).get("content-type", "json").lower()
    ):
        return
    if sum(body.count(mark) for mark in (b",", b"{", b"[")) > MOST_ELEMENTS:
        raise TooLarge(f"A request may have {MOST_ELEMENTS:,} elements at most.")


class BodyRoom:
    """The bytes that one request takes out of what all may take together: those that have come, not those announced."""

    def __init__(self, gate: Gate, scope: Scope) -> None:
        self._gate, self._counted = gate, 0
        asks = scope["method"] == "POST" and scope["path"] not in OPEN
        self._most = gate.limits.body_bytes if asks else LARGEST_WITHOUT_NEED
        length = Headers(scope=scope).get("content-length", "0")
        self._announced = (
            int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
        )

    def __enter__(self) -> BodyRoom:
        self._check(self._announced)
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.bytes -= self._counted

    def count(self, total: int) -> None:
        """So many bytes have come. Raises where that is too much."""
        self._check(total)
        more = total - self._counted
        if self._gate.bytes + more > self._gate.limits.all_body_bytes:
            raise Unavailable("Too many bytes are on their way to this server.")
        self._gate.bytes += more
        self._counted = total

    def _check(self, total: int) -> None:
        if total > self._most:
            raise TooLarge(f"This request may have {size(self._most)} at most.")

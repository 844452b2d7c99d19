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
import time
from collections.abc import Iterable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lapclip.serving.dialects import REFUSED, answer_refusal
from lapclip.serving.refusals import Forbidden, Late, NoKey, Refusal, TooLarge, Unavailable
from lapclip.serving.service import Service
from lapclip.web.security import HEADERS, LONGEST_PATH, Door, let_in

OPEN = ("/health", "/ready", "/ping")
"""Paths that tell nothing but whether the server works: load balancers have no key."""
IMMICH = ("/predict",)
"""What Immich asks, which cannot send a key."""
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
        began, started = time.monotonic(), False

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
            with self._body_room(scope) as room:
                body = await self._read(receive, room)
                self._service.metrics.phase("read", time.monotonic() - began)
                await self._answer(scope, body, receive, send_with_headers)
        except Refusal as refusal:
            if not started:
                answer = answer_refusal(scope, refusal)
                answer.headers["Connection"] = "close"  # the request may not have been read to its end
                await answer(scope, receive, send_with_headers)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        """By the path of a route: what was asked stays out of the metrics."""
        route = scope.get("route")
        self._service.metrics.answered(getattr(route, "path", "other"), scope["method"], status, seconds)
        if (code := scope.get(REFUSED)) is not None:
            self._service.metrics.refused(code)

    def _check(self, scope: Scope) -> None:
        """Raise where a request may not come in."""
        headers = Headers(scope=scope)
        if (refused := self._door.foreign(scope, headers)) is not None:
            raise Forbidden(refused)
        if len(scope["path"]) > LONGEST_PATH:
            raise Refusal("No address here is that long.")
        if self._key is None or scope["path"] in self._open:
            return
        if not (self._has_key(headers) or self._door.has_token(scope, headers)):
            raise NoKey(
                "The API key is missing or wrong.", hint="the header `Authorization: Bearer KEY`, or `X-API-Key: KEY`"
            )

    def _has_key(self, headers: Headers) -> bool:
        given = [headers.get("x-api-key", "")]
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given.append(key.strip())
        assert self._key is not None
        return any(secrets.compare_digest(text.encode("utf-8", "replace"), self._key.encode()) for text in given)

    def _body_room(self, scope: Scope) -> BodyRoom:
        length = Headers(scope=scope).get("content-length", "0")
        announced = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
        return BodyRoom(self, announced)

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
            raise Late(f"The request was not sent completely within {self.limits.body_seconds:.0f} seconds.") from None

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


class BodyRoom:
    """The bytes that one request takes out of what all may take together."""

    def __init__(self, gate: Gate, announced: int) -> None:
        self._gate, self._announced, self._counted = gate, announced, 0

    def __enter__(self) -> BodyRoom:
        self.count(self._announced)
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.bytes -= self._counted

    def count(self, total: int) -> None:
        """A request has, or will have, so many bytes. Raises where that is too much."""
        limits = self._gate.limits
        if total > limits.body_bytes:
            raise TooLarge(f"A request may have {limits.body_bytes // 10**6} MB at most.")
        more = max(0, total - self._counted)
        if self._gate.bytes + more > limits.all_body_bytes:
            raise Unavailable("Too many bytes are on their way to this server.")
        self._gate.bytes += more
        self._counted += more

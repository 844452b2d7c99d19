"""Who may ask, what a browser may do with the answers, and how many connections there may be and for how long.

A page on the web can make a browser ask this machine: by a name that it lets point here (DNS rebinding), or by an
address in its own text. So the Host must be one we serve, an Origin must be our own, and what another site embeds is
refused. Other accounts of this machine reach the same address as its user: so a token is needed as well, which stands
in the address that is printed and moves into a cookie with the first request.

Requests that are sent by halves, connections over which nothing is asked, and answers that nobody reads cost whoever
makes them nothing. They end after a while, and the oldest of them makes room where there are too many, so that a page
stays within reach.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",  # plotly.js draws heat maps and saved images as such
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
LONGEST_PATH = 1000
"""Characters. Beyond 4,300 digits Python makes no number of a text, and the router would fail at it."""
MOST_CONNECTIONS = 100
"""Those that stay. A browser opens six, and a few tabs more for what they follow."""
MORE_FOR_A_MOMENT = 300
A_MOMENT = 0.1
"""Seconds that a new connection has to ask before it may have to make room: many are accepted before any is read."""
SECONDS_TO_ASK = 10.0
"""From the first byte of a request, or from the connection before there is one, to the end of its headers."""
SECONDS_TO_READ, LEAST_READ = 30.0, 300_000
"""In so many seconds a reader has to take so many bytes of an answer, which waits in memory, or all that is left."""
MOST_UNREAD = 200_000_000
"""Bytes of all answers together that wait to be read: beyond it, who has been reading for longest is let go."""


@dataclass(frozen=True)
class Door:
    """Which names of this machine are ours, and the token that opens."""

    names: frozenset[str]
    token: str
    """Empty where none is asked for."""
    any_address: bool = False
    """Whether any numeric address will do as a name: no foreign site can have one of ours."""
    command: str = "lapclip"
    """What the user types to start the server: the address that it prints holds the token."""

    def refuses(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason, or None for those who may come in."""
        headers = Headers(scope=scope)
        if (foreign := self.foreign(scope, headers)) is not None:
            return 403, foreign
        if not self.has_token(scope, headers):
            return 401, f"Open the whole address that {self.command} printed: it ends in a token."
        if len(scope["path"]) > LONGEST_PATH:
            return 414, "No address here is that long."
        return None

    def foreign(self, scope: Scope, headers: Headers) -> str | None:
        """Why a request comes from a page of another site, or to a name that is not ours; None where it does not."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._knows(hosts[0]):
            return "This server answers to the address that it printed at its start, and to no other name."
        if any(_place(origin) != hosts[0] for origin in headers.getlist("origin")):
            return "Another site's page may not read this."
        if followed_a_link(headers) and not (
            headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        ):
            return "Another site's page may not use this."
        return None

    def has_token(self, scope: Scope, headers: Headers) -> bool:
        """Whether the address or a cookie holds the token."""
        return self.token_in(scope) or self._cookie_in(headers)

    def opens(self, scope: Scope) -> bool:
        """Whether this is the printed address, whose token moves into a cookie (`let_in`)."""
        return scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and self.token_in(scope)

    def token_in(self, scope: Scope) -> bool:
        """Whether the address holds the token."""
        if not self.token:
            return False
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        return any(_same(text, self.token) for text in given)

    def cookie_name(self, headers: Headers) -> str:
        """By the port that the browser sees: it sends a host's cookies to all ports, and two pages, one of which may
        come through `ssh -L`, must not overwrite each other's."""
        _, port = _name_and_port(headers.get("host", ""))
        return f"lapclip_{port}"

    def _cookie_in(self, headers: Headers) -> bool:
        # Taken apart by hand: other servers of this host have cookies too, and the parser of the standard library
        # gives up at the first that it does not like.
        pairs = (
            pair.partition("=") for line in headers.getlist("cookie") for pair in line.split(";")
        )
        name = self.cookie_name(headers)
        return bool(self.token) and any(
            key.strip() == name and _same(value.strip(), self.token) for key, _, value in pairs
        )

    def _knows(self, host: str) -> bool:
        name, _ = _name_and_port(host)
        return name in self.names or (self.any_address and is_address(name))


def door_for(
    host: str, command: str, *, loopback: bool, token: bool = True, names: Iterable[str] = ()
) -> Door:
    """The door of a server that listens at `host`, and that is also known by other names, as behind a proxy."""
    known = LOOPBACK_NAMES | {host.lower()} | {name.lower() for name in names}
    secret = secrets.token_urlsafe(24) if token else ""
    if loopback:
        return Door(known, secret, command=command)
    own = socket.gethostname().lower()
    return Door(known | {own, f"{own}.local"}, secret, any_address=True, command=command)


class Guard:
    """Wraps the application: refuses who may not ask, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        app = self._app
        if refused := self._door.refuses(scope):
            app = PlainTextResponse(refused[1] + "\n", refused[0])
        elif self._door.opens(scope):
            app = let_in(self._door, Headers(scope=scope))
        # What we send is small enough to be sent whole, and readers of ranges have had faults.
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"range"]
        await app(scope, receive, send_guarded)


def let_in(door: Door, headers: Headers) -> Response:
    """Move the token from the address into a cookie that no script can read."""
    if followed_a_link(headers):
        # After a redirect the browser would count the request as the other site's, and withhold the cookie.
        # With an icon, or the browser would ask for favicon.ico.
        page = '<!doctype html><link rel="icon" href="/icon.svg"><p>The page opens.\n'
        answer = HTMLResponse(page, headers={"Refresh": "0; url=/"})
    else:
        answer = RedirectResponse("/", 303)
    answer.set_cookie(door.cookie_name(headers), door.token, httponly=True, samesite="strict")
    return answer


def followed_a_link(headers: Headers) -> bool:
    """Whether another site led here."""
    return headers.get("sec-fetch-site") in ("cross-site", "same-site")


def is_address(name: str) -> bool:
    """Whether a name is a numeric address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_and_port(host: str) -> tuple[str, int]:
    """The parts of a Host header. A malformed one has no name."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").lower(), parts.port or 80
    except ValueError:
        return "", 0


def _place(origin: str) -> str | None:
    """Name and port of an Origin header; None for a malformed one."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _same(given: str, expected: str) -> bool:
    """Compared in constant time: the time to refuse tells nothing about the token."""
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


class Connection(H11Protocol):
    """uvicorn's, with an end for those who do not come to the point."""

    most = MOST_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _unread_since: float | None = None

    @property
    def asking(self) -> bool:
        """Whether a whole request has come whose answer is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_gone(self) -> bool:
        """A closed connection stays for as long as its answer is not read."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._expect_a_request()
        if len(self.connections) > self.most + MORE_FOR_A_MOMENT:
            transport.abort()
        elif len(self.connections) > self.most:
            self.loop.call_later(A_MOMENT, self._make_room)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.asking:
            self._expect_a_request()
        elif self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Called where much of an answer waits to be read."""
        super().pause_writing()
        self._unread_since = self.loop.time()
        self._expect_a_reader()
        self._let_slow_readers_go()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None
        if self._look is not None:
            self._look.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer was under way already
            self.transport.abort()

    def _make_room(self) -> None:
        """Close the connection that has been idle longest if there are too many."""
        open_connections = []
        for connection in self.connections:
            if isinstance(connection, Connection) and not connection.is_gone:
                open_connections.append(connection)
        idle = [connection for connection in open_connections if not connection.asking]
        if len(open_connections) > self.most and idle:
            longest_idle = min(idle, key=lambda connection: connection._idle_since)
            longest_idle.transport.abort()

    def _let_slow_readers_go(self) -> None:
        """Where too much waits to be read; whose answer has just come is not among them."""
        there = (each for each in self.connections if isinstance(each, Connection))
        slow = [(each._unread_since, each) for each in there if each._unread_since is not None]
        unread = sum(each.transport.get_write_buffer_size() for _, each in slow)
        for _, each in sorted(slow, key=lambda one: one[0]):
            if unread <= MOST_UNREAD or each is self:
                break
            unread -= each.transport.get_write_buffer_size()
            each.transport.abort()

    def _expect_a_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()

        def look() -> None:
            if unread - self.transport.get_write_buffer_size() < LEAST_READ:
                self.transport.abort()
            else:
                self._expect_a_reader()

        self._look = self.loop.call_later(SECONDS_TO_READ, look)

    def _expect_a_request(self) -> None:
        """Not from the latest byte on: a byte now and then is no request."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(SECONDS_TO_ASK, self.transport.abort)

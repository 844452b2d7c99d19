"""Who may ask, and what a browser may do with the answers.

A page on the web can make a browser ask this machine: by a name that it lets point here (DNS rebinding), or by an
address in its own text. So the Host must be one we serve, an Origin must be our own, and what another site embeds is
refused. Beyond this machine a token is needed as well.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


@dataclass(frozen=True)
class Door:
    """Which names of this machine are ours, and the token, if one is needed."""

    names: frozenset[str]
    any_address: bool = False
    """Whether any numeric address will do as a name: no foreign site can have one of ours."""
    token: str | None = None
    cookie: str = "lapclip"
    command: str = "lapclip"
    """What the user types to start the server: the address that it prints holds the token."""

    def refuses(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason, or None for those who may come in."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._knows(hosts[0]):
            return 403, "This server answers to the address that it printed at its start, and to no other name."
        if any(urlsplit(origin).netloc != hosts[0] for origin in headers.getlist("origin")):
            return 403, "Another site's page may not read this."
        arrival = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not arrival:
            return 403, "Another site's page may not use this."
        if self.token is not None and not (self.token_in(scope) or self._cookie_in(headers)):
            return 401, f"Open the whole address that {self.command} printed: it ends in a token."
        return None

    def token_in(self, scope: Scope) -> bool:
        """Whether the address holds the token."""
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        return self.token is not None and any(_same(text, self.token) for text in given)

    def _cookie_in(self, headers: Mapping[str, str]) -> bool:
        try:
            given = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return given is not None and self.token is not None and _same(given.value, self.token)

    def _knows(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self.names or (self.any_address and is_address(name))


def door_for(host: str, port: int, command: str, *, loopback: bool) -> Door:
    """The door of a server that listens at `host`. One that others can reach gets a token."""
    names = LOOPBACK_NAMES | {host.lower()}
    if loopback:
        return Door(names, command=command)
    own = socket.gethostname().lower()
    # A browser sends a host's cookies to all its ports: two servers must not overwrite each other's.
    return Door(names | {own, f"{own}.local"}, True, secrets.token_urlsafe(24), f"lapclip_{port}", command)


class Guard:
    """Wraps the application: refuses who may not ask, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        gave_token = self._door.token_in(scope) and scope["path"] == "/"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
                if gave_token:
                    cookie = f"{self._door.cookie}={self._door.token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("Set-Cookie", cookie)
            await send(message)

        refused = self._door.refuses(scope)
        if refused:
            gave_token = False
            await PlainTextResponse(refused[1] + "\n", refused[0])(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)


def is_address(name: str) -> bool:
    """Whether a name is a numeric address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(given: str, expected: str) -> bool:
    """Compared in constant time: the time to refuse tells nothing about the token."""
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())

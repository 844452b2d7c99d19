"""How many connections there may be, and how long one may take to ask.

Requests that are sent by halves, and connections over which nothing is asked, cost whoever makes them nothing. They
end after a while, and the oldest of them makes room where there are too many, so that a page stays within reach.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 100
"""Connections that stay. A browser opens six, and a few tabs more for what they follow."""
MORE_FOR_A_MOMENT = 300
A_MOMENT = 0.1
"""Seconds that a new connection has to ask before it may have to make room: many are accepted before any is read."""
SECONDS_TO_ASK = 10.0
"""From the first byte of a request, or from the connection before there is one, to the end of its headers."""


class Connection(H11Protocol):
    """uvicorn's, with an end for those who do not come to the point."""

    most = MOST
    _deadline: asyncio.TimerHandle | None = None

    @property
    def asking(self) -> bool:
        """Whether a whole request has come whose answer is under way."""
        return self.cycle is not None and not self.cycle.response_complete

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

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer was under way already
            self.transport.abort()

    def _make_room(self) -> None:
        there = [each for each in self.connections if isinstance(each, Connection) and not each.transport.is_closing()]
        idle = [each for each in there if not each.asking]
        if len(there) > self.most and idle:
            min(idle, key=lambda each: each._idle_since).transport.abort()

    def _expect_a_request(self) -> None:
        """Not from the latest byte on: a byte now and then is no request."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(SECONDS_TO_ASK, self.transport.abort)

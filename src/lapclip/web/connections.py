"""How many connections there may be, how long one may take to ask, and how slowly it may read its answer.

Requests that are sent by halves, connections over which nothing is asked, and answers that nobody reads cost whoever
makes them nothing. They end after a while, and the oldest of them makes room where there are too many, so that a page
stays within reach.
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
SECONDS_TO_READ, LEAST_READ = 30.0, 300_000
"""In so many seconds a reader has to take so many bytes of an answer, which waits in memory, or all that is left."""
MOST_UNREAD = 200_000_000
"""Bytes of all answers together that wait to be read: beyond it, who has been reading for longest is let go."""


class Connection(H11Protocol):
    """uvicorn's, with an end for those who do not come to the point."""

    most = MOST
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
        there = [each for each in self.connections if isinstance(each, Connection) and not each.is_gone]
        idle = [each for each in there if not each.asking]
        if len(there) > self.most and idle:
            min(idle, key=lambda each: each._idle_since).transport.abort()

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

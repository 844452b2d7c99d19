"""The runs of this folder, a line each; and one run as it goes on, read once for all tabs that show it.

A stream of server-sent events begins with the events so far (of a long run not every step), goes on with each new
one, and ends with the run. Reading takes a two-hundredth of a core: the longer it takes, the rarer it is.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

from lapclip.runs.folder import Run, all_runs
from lapclip.runs.follow import FollowedRun, RunStatus
from lapclip.runs.view import WORKING, RunView
from lapclip.text import to_json
from lapclip.watch.web.snapshot import snapshot

SHARE = 0.005
"""Of a core, for reading a run, and as much for making a snapshot of it."""
LEAST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
STEPS_AT_ONCE = 25
"""Of more new steps than this, some are left out: a tab has to draw them."""
RECENT = 500
"""New events that are remembered for streams that go on where they were cut off."""
QUIET = 15.0
"""Seconds after which a silent stream says that it is still there."""
IDLE_FEEDS = 1
RESTART = b"event: restart\ndata: {}\n\n"

_generations = itertools.count(time.time_ns())


class RunList:
    """The runs of this folder, a line each."""

    def __init__(self) -> None:
        self._statuses: dict[str, RunStatus] = {}
        self._rows: list[dict[str, Any]] = []
        self._next = 0.0

    def rows(self) -> list[dict[str, Any]]:
        """A line for each run, the newest last. Read at most once a second, however many ask."""
        began = time.monotonic()
        if began < self._next:
            return self._rows
        runs = all_runs()
        self._statuses = {run.name: self._statuses.get(run.name) or RunStatus(run) for run in runs}
        for status in self._statuses.values():
            status.refresh()
        self._rows = [_row(self._statuses[run.name]) for run in runs]
        taken = time.monotonic() - began
        self._next = began + taken + min(10.0, max(1.0, 50 * taken))
        return self._rows


def _row(status: RunStatus) -> dict[str, Any]:
    """A run's line. It ends with the event that ends it: its process may take a moment longer."""
    progress = status.progress
    state = progress.ending.get("type", status.state)
    standing = RunView.status_of(state, bool(progress.paused), bool(progress.step)).capitalize()
    return {**status.row(), "state": state, "status": standing, "working": state in WORKING}


def run_named(name: str) -> Run | None:
    """The run of this name in this folder, if there is one: no path is ever built from what a browser sends."""
    return next((run for run in all_runs() if run.name == name), None)


class Feed:
    """One run, read for all who watch it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.streams = 0
        self.used = time.monotonic()
        self.gone = False
        self.row: dict[str, Any] = {}
        self.generation = next(_generations)
        """Another number after the run was replaced, and after this server began again."""
        self.count = 0
        self._followed = FollowedRun(run)
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT)
        self._first: dict[str, Any] | None = None
        self._events: list[dict[str, Any]] = []
        self._events_count = 0
        self._lock = asyncio.Lock()
        self._next_read = self._next_snapshot = 0.0
        self._snapshot: tuple[str, bytes] = ("", b"")

    @property
    def pause(self) -> float:
        """Seconds until it is worth to look again."""
        return max(0.05, self._next_read - time.monotonic())

    @property
    def position(self) -> str:
        """What has been read so far, for a stream that goes on from here."""
        return f"{self.generation:x}-{self.count}"

    @property
    def ended(self) -> bool:
        return self.row.get("state") not in ("starting", "running")

    async def refresh(self) -> None:
        """Read what is new, unless that was done just now."""
        async with self._lock:
            if time.monotonic() >= self._next_read:
                began = time.monotonic()
                self._take(*await asyncio.to_thread(self._read))
                now = time.monotonic()
                self._next_read = now + min(LONGEST_PAUSE, max(LEAST_PAUSE, (now - began) / SHARE))

    async def snapshot(self) -> tuple[str, bytes]:
        """The run as numbers, encoded, with a tag that changes when they do. Made once for all who ask."""
        await self.refresh()
        async with self._lock:
            tag = f"{self.position}-{self.row['state']}-{bool(self.row['paused'])}"
            due = time.monotonic() >= self._next_snapshot or self.ended
            if not self._snapshot[0] or (tag != self._snapshot[0] and due):
                self._snapshot = await asyncio.to_thread(self._make_snapshot, tag)
            return self._snapshot

    async def stream(self, position: str | None, closing: asyncio.Event) -> AsyncIterator[bytes]:
        """The events after a position, or all there are; then each new one."""
        self.streams += 1
        try:
            await self.refresh()
            generation, sent = self._resume_after(position)
            if position and generation is None:
                yield RESTART
            quiet_since = time.monotonic()
            while not closing.is_set():
                if generation != self.generation:
                    if generation is not None:
                        yield RESTART
                    generation, sent, events = (
                        self.generation,
                        self.count,
                        self._events[: self._events_count],
                    )
                    for first in range(0, len(events), 200):
                        yield b"".join(map(_message, events[first : first + 200]))
                if new := [(number, event) for number, event in self._recent if number > sent]:
                    sent = new[-1][0]
                    quiet_since = time.monotonic()
                    yield b"".join(
                        _message(event, f"{generation:x}-{number}") for number, event in new
                    )
                if self.gone or self.ended:
                    kind = "gone" if self.gone else "end"
                    yield f"event: {kind}\ndata: {to_json({'state': self.row.get('state')})}\n\n".encode()
                    return
                if time.monotonic() - quiet_since > QUIET:
                    quiet_since = time.monotonic()
                    yield b": still here\n\n"
                await wait(closing, self.pause)
                await self.refresh()
        finally:
            self.streams -= 1
            self.used = time.monotonic()

    def _resume_after(self, position: str | None) -> tuple[int | None, int]:
        """Where a stream goes on, if that is known here and nothing in between has been forgotten."""
        try:
            generation, number = (position or "").split("-")
            sent = int(number)
            oldest = self._recent[0][0] if self._recent else self.count + 1
            if int(generation, 16) == self.generation and oldest - 1 <= sent <= self.count:
                return self.generation, sent
        except ValueError:
            pass
        return None, 0

    def _read(self) -> tuple[bool, dict[str, Any], list[dict[str, Any]]]:
        new = self._followed.refresh()
        return run_named(self.run.name) is None, _row(self._followed), new

    def _take(self, gone: bool, row: dict[str, Any], new: list[dict[str, Any]]) -> None:
        """What was read becomes what streams see, in one go."""
        self.gone, self.row, events = gone, row, self._followed.events
        if self._first is not None and (
            not events or events[0] is not self._first
        ):  # another file in its place
            self.generation, self.count = next(_generations), 0
            self._recent.clear()
        self._first = events[0] if events else None
        self._events, self._events_count = (
            events,
            len(events),
        )  # the list may grow while it is being sent
        self._recent.extend(_thinned(list(enumerate(new, self.count + 1))))
        self.count += len(new)

    def _make_snapshot(self, tag: str) -> tuple[str, bytes]:
        began = time.monotonic()
        encoded = to_json(
            {"position": self.position, **snapshot(self.row, self._followed.view)}
        ).encode()
        now = time.monotonic()
        self._next_snapshot = now + min(LONGEST_PAUSE, max(LEAST_PAUSE, (now - began) / SHARE))
        return tag, encoded


class Feeds:
    """The feeds in use. Those that nobody watches are forgotten, but for the latest."""

    def __init__(self) -> None:
        self._feeds: dict[str, Feed] = {}

    def get(self, name: str) -> Feed | None:
        """The feed of a run of this folder."""
        run = run_named(name)
        if run is None:
            if (old := self._feeds.get(name)) and not old.streams:
                del self._feeds[name]
            return None
        feed = self._feeds.get(name) or Feed(run)
        feed.used = time.monotonic()
        self._feeds[name] = feed
        idle = sorted(
            (each for each in self._feeds.values() if not each.streams), key=lambda each: each.used
        )
        for each in idle[:-IDLE_FEEDS]:
            del self._feeds[each.run.name]
        return feed


async def wait(closing: asyncio.Event, seconds: float) -> None:
    """Sleep, unless the server ends."""
    try:
        await asyncio.wait_for(closing.wait(), seconds)
    except TimeoutError:
        pass


def _message(event: dict[str, Any], number: str | None = None) -> bytes:
    name = f"id: {number}\n" if number else ""
    return f"{name}data: {to_json(event, compact=True)}\n\n".encode()


def _thinned(new: list[tuple[int, dict[str, Any]]]) -> Iterable[tuple[int, dict[str, Any]]]:
    """All that are not steps, and of many steps a few at even distances and the newest."""
    steps = [number for number, event in new if event["type"] == "step"]
    if len(steps) <= STEPS_AT_ONCE:
        return new
    apart = -(-len(steps) // STEPS_AT_ONCE)
    chosen = {*steps[::-apart]}
    return [(number, event) for number, event in new if event["type"] != "step" or number in chosen]

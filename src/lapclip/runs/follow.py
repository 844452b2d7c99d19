"""A run that someone watches from another process: its events read as they come, and how it stands now.

A long run has a million lines. Of a large file every line that is not a step is read, and steps at even distances: what
a screen can show. What is appended later is read line by line.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path
from typing import IO, Any

from lapclip.errors import split_hint
from lapclip.paths import open_own
from lapclip.runs.events import LONGEST_LINE, parse_lines
from lapclip.runs.findings import Finding, findings
from lapclip.runs.findings.checks import surroundings_of
from lapclip.runs.folder import Run
from lapclip.runs.summary import RunProgress, Summary, summarise, usual_gap
from lapclip.runs.view import RunView
from lapclip.text import number, one_line

WHOLE_FILE = 3_000_000
"""Bytes up to which a file is simply read."""
SAMPLED_STEPS = 2000
"""Steps that are taken of a larger one."""
WHOLE_ENDS = 200_000
"""Bytes at the beginning and the end in which no line is left out."""
LINES_AT_ONCE = 200
"""Lines that are read together."""

_STEP = re.compile(rb'\{"v":\d+,"type":"step"')
MOST_STEPS = 5000
"""More steps than this are thinned to half as many: a page that is open for a day does not grow."""
THINNED = ("step", "ranks")
STATE_EVERY = 1.0
"""Seconds after which a run without new events is asked whether its process is still there."""
SURROUNDINGS_EVERY = 3.0
"""Seconds between two checks of what else is at work on this machine."""
LEAST_SILENCE, SILENCE = 60.0, 10
"""Seconds without an event, and times the longest of the last gaps, that are worth mentioning."""


class Tail:
    """Follows one file of events. It may not be there yet, may be replaced, and may end in half a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarted = False
        """Whether the last `read` began again because the file was replaced or cut."""
        self._position = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> list[dict[str, Any]]:
        """The events since the last call; at the first, those so far."""
        self.restarted = False
        try:
            with open_own(self.path) as file:
                return self._read(file)
        except OSError:  # not there yet, or not any more
            return []

    def _read(self, file: IO[bytes]) -> list[dict[str, Any]]:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity) or status.st_size < self._position:
            self._position, self.restarted = 0, True
        self._identity = identity
        if status.st_size == self._position:
            return []
        lines, self._position = _read_lines(file, self._position, status.st_size)
        batches = [lines[at : at + LINES_AT_ONCE] for at in range(0, len(lines), LINES_AT_ONCE)]
        return list(itertools.chain.from_iterable(map(parse_lines, batches)))


def _read_lines(file: IO[bytes], start: int, end: int) -> tuple[list[bytes], int]:
    """Return the complete lines between two positions, and the position after the last of them.

    If there is much between them: all lines that are not steps, and steps at even distances.
    """
    spacing = (end - start) // SAMPLED_STEPS if end - start > WHOLE_FILE else 0
    lines: list[bytes] = []
    position = next_step = start
    is_whole = True  # False in the rest of a line that is too long to be an event
    file.seek(start)
    while part := file.readline(min(LONGEST_LINE, end - position)):
        ends = part.endswith(b"\n")
        if not ends and len(part) < LONGEST_LINE:
            break  # half a line
        is_near_an_end = position < start + WHOLE_ENDS or position > end - WHOLE_ENDS
        is_step = _STEP.match(part) is not None
        if ends and is_whole and (not is_step or is_near_an_end or position >= next_step):
            lines.append(part)
            if is_step:
                next_step = position + spacing
        position += len(part)
        is_whole = ends
    return lines, position


class RunStatus:
    """How far one run is, told from its events as they come. The events themselves are not held."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state = "starting"
        """What `Run.state` says, or gone (deleted)."""
        self.progress = RunProgress()
        self._tail = Tail(run.events)
        self._restarted = False

    def refresh(self) -> list[dict[str, Any]]:
        """Read what is new, and return it."""
        self._restarted = False
        new = self._read()
        self.state = self._current_state()
        if self.state == "died" and (
            late := self._read()
        ):  # it may have ended well since the file was read
            new += late
            self.state = self._current_state()
        return new

    def _read(self) -> list[dict[str, Any]]:
        new = self._tail.read()
        if self._tail.restarted:
            self.progress, self._restarted = RunProgress(), True
        for event in new:
            self.progress.take(event)
        return new

    def _current_state(self) -> str:
        """The state, without reading a long file again."""
        if not self.run.path.is_dir():
            return "gone"
        return self.run.state_after(lambda: self.progress.ending.get("type", "died"))

    def row(self) -> dict[str, Any]:
        """The run as a line in a list of runs."""
        progress = self.progress
        return {
            "name": self.run.name,
            "state": self.state,
            "step": progress.step,
            "steps": progress.total_steps,
            "best": progress.best_recall,
            "best_split": progress.best_split,
            "best_step": progress.best_step,
            "started": number(progress.started.get("time")),
            "paused": RunView.reason_of(progress.paused),
            "reason": self._reason(),
        }

    def _reason(self) -> str | None:
        """Return why it failed."""
        if self.state != "failed":
            return None
        return one_line(split_hint(str(self.progress.ending.get("error") or ""))[0]) or None


class FollowedRun(RunStatus):
    """One run with its events, as many as a screen can show. Its folder may not be there yet, and may go away."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.name = run.name
        self.events: list[dict[str, Any]] = []
        self.summary = Summary()
        self._steps = 0
        self._signature: tuple[int, int] | None = None
        self._asked = self._news = -1e9
        self._view: RunView | None = RunView(run.name, "starting")
        self._silent_seconds = 0.0
        self._findings: tuple[Finding, ...] | None = ()
        self._around, self._next_around = None, 0.0

    def changed(self) -> bool:
        """Whether there is something to read, or it is time to ask for the state again. Costs next to nothing."""
        return self._file() != self._signature or time.monotonic() - self._asked >= STATE_EVERY

    def refresh(self) -> list[dict[str, Any]]:
        """Read what is new, and return it; summary and view are up to date then."""
        self._signature, self._asked = self._file(), time.monotonic()
        first, state_before = not self.events, self.state
        new = super().refresh()
        if self._restarted:
            self.events, self._steps = [], 0
        if new or self._restarted:
            self._take(new)
        if new and not first:
            self._news = self._asked
        silent = self._silence()
        if new or self._restarted or self.state != state_before:
            self._findings = self._view = None
        elif silent or self._silent_seconds:
            self._view = None
        self._silent_seconds = silent
        return new

    @property
    def view(self) -> RunView:
        """How the run stood at the last refresh."""
        if self._view is None:
            if self._findings is None:
                self._findings = tuple(self._find())
            silent = (
                self._silent_seconds if self.state == "running" and not self.summary.paused else 0.0
            )
            self._view = RunView(self.name, self.state, self.summary, self._findings, silent)
        return self._view

    def _take(self, new: list[dict[str, Any]]) -> None:
        self.events += new
        self._steps += sum(1 for event in new if event["type"] == "step")
        if self._steps > MOST_STEPS:
            self.events = thin_steps(self.events)
            self._steps = sum(1 for event in self.events if event["type"] == "step")
        self.summary = summarise(self.events)

    def _silence(self) -> float:
        """Seconds since the last event, where that is unusually long."""
        if not self.summary.steps or self.summary.ending:
            return 0.0
        last = self.events[-1].get("time")
        by_the_clock = time.time() - last if isinstance(last, int | float) else 0.0
        # A clock that jumps must not look like silence, so what was seen to arrive counts more.
        passed = min(by_the_clock, time.monotonic() - self._news)
        return (
            passed
            if passed > max(LEAST_SILENCE, SILENCE * (usual_gap(self.summary) or 0.0))
            else 0.0
        )

    def _find(self) -> list[Finding]:
        """What is wrong. That the checks themselves fail is told too: everything else is still true."""
        now = time.monotonic()
        if self._around is None or self._around.state != self.state or now >= self._next_around:
            self._around, self._next_around = (
                surroundings_of(self.run, self.state),
                now + SURROUNDINGS_EVERY,
            )
        try:
            return findings(self.summary, self._around)
        except Exception as error:
            return [
                Finding(
                    "checks", "note", "The checks failed", f"{type(error).__name__}: {error}", ""
                )
            ]

    def _file(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.run.events)
        except OSError:
            return None
        return status.st_size, status.st_ino


def thin_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out every other step, those with and without measured phases alike, and every other account of ranks, of
    which there is one a step at most; but not the newest, and no other event."""
    chosen, odd = [], dict[tuple[str, bool], bool]()
    newest = [
        next((event for event in reversed(events) if event["type"] == kind), None)
        for kind in THINNED
    ]
    for event in events:
        if event["type"] in THINNED and not any(event is latest for latest in newest):
            kind = event["type"], bool(event.get("seconds"))
            odd[kind] = not odd.get(kind)
            if odd[kind]:
                continue
        chosen.append(event)
    return chosen

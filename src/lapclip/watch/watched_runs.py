"""The runs that are being watched: which they are, and how each stands now."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from lapclip.config import DEFAULT_RECIPE
from lapclip.errors import RunError
from lapclip.runs.event_log import read_events
from lapclip.runs.findings import Finding, Surroundings, findings
from lapclip.runs.folder import RUNS, Run, all_runs, find_run
from lapclip.runs.follow import Following
from lapclip.runs.forecast import forecast
from lapclip.runs.summary import Summary
from lapclip.watch.event_notices import notices, pausing
from lapclip.watch.run_view import Look, usual_gap

STATE_EVERY = 1.0
"""Seconds after which a run that says nothing is asked whether its process is still there."""
SEARCH_EVERY = 3.0
"""Seconds between two searches for runs that began meanwhile."""
LEAST_SILENCE, SILENCE = 60.0, 10
"""Seconds without an event, and times the longest of the last gaps, that are worth a word."""


class _FollowedRun(Run):
    """A run whose events are known already: asking for its state does not read a long file again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.summary = Summary()

    def last_state(self) -> str:
        return str(self.summary.ending.get("type") or "died")


class Watched:
    """One run. Its folder may not be there yet, and may go away."""

    def __init__(self, path: Path) -> None:
        self.run = _FollowedRun(path)
        self.name = path.name
        self.look = Look(self.name, "waiting")
        self.seen = False
        """Whether there ever was such a folder."""
        self._following = Following(self.run.events)
        self._signature: tuple[int, int] | None = None
        self._asked = self._news = -1e9
        self.rivals: tuple[str, ...] = ()
        """Other runs at work on the same device."""
        self._recipe = ""

    def changed(self) -> bool:
        """Whether there is something to read, or it is time to ask for the state again. Costs next to nothing."""
        return self._file() != self._signature or time.monotonic() - self._asked >= STATE_EVERY

    def refresh(self) -> list[dict]:
        """Read what is new, give it back, and look again."""
        self._signature, self._asked = self._file(), time.monotonic()
        first = not self._following.events
        new = self._following.refresh()
        if new:
            self.run.summary = self._following.summary
            self._news = self._news if first else self._asked
        state, silent = self._state(), self._silence()
        if new or state != self.look.state or silent or self.look.silent_seconds:
            events, summary = self._following.events, self._following.summary
            self.look = Look(
                self.name,
                state,
                summary,
                forecast(summary) if state in ("running", "paused") else None,
                tuple(notices(events, summary)),
                tuple(self._findings(summary, state)) if new or state != self.look.state else self.look.findings,
                pausing(events) if state == "paused" else None,
                str(self.run.log),
                silent if state == "running" else 0.0,
            )
        return new

    def _state(self) -> str:
        if not self.run.path.is_dir():  # asked first: to ask for a lock would make the folder again
            return "gone" if self.seen else "waiting"
        self.seen = True
        state = self.run.state
        if state == "running" and pausing(self._following.events) is not None:
            return "paused"
        return "starting" if state == "running" and not self._following.summary.steps else state

    def _silence(self) -> float:
        summary = self._following.summary
        if not summary.steps or summary.ending:
            return 0.0
        last = self._following.events[-1].get("time")
        by_the_clock = time.time() - last if isinstance(last, int | float) else 0.0
        # A clock that jumps must not look like silence, so what was seen to arrive counts more.
        passed = min(by_the_clock, time.monotonic() - self._news)
        return passed if passed > max(LEAST_SILENCE, SILENCE * (usual_gap(summary) or 0.0)) else 0.0

    def _findings(self, summary: Summary, state: str) -> list[Finding]:
        if not self._recipe:
            try:
                self._recipe = self.run.recipe
            except (RunError, KeyError):  # its events can be read all the same
                self._recipe = DEFAULT_RECIPE
        asked = "running" if state in ("paused", "starting") else state  # to the findings both are at work
        return findings(summary, Surroundings(self.name, self._recipe, asked, self.rivals))

    def _file(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.run.events)
        except OSError:
            return None
        return status.st_size, status.st_ino


class Watching:
    """Several runs, one of them in focus. Without names: those that run, else the newest, and those that begin."""

    def __init__(self, names: Sequence[str], wait: bool) -> None:
        """`wait` accepts a name that has no folder yet; else it is an error."""
        self._every = not names
        self._began = time.time()
        self._searched = -1e9
        if names:
            paths = [_path(name, wait) for name in dict.fromkeys(names)]
        else:
            if not wait:
                find_run(None)
            runs = all_runs()
            paths = [run.path for run in [run for run in runs if _runs_now(run)] or runs[-1:]]
        self.runs = [Watched(path) for path in paths]
        self.focus = max(0, len(self.runs) - 1) if self._every else 0

    @property
    def focused(self) -> Watched | None:
        return self.runs[self.focus] if self.runs else None

    @property
    def looks(self) -> list[Look]:
        return [run.look for run in self.runs]

    def move(self, by: int) -> None:
        """Put another run in focus, round and round."""
        if self.runs:
            self.focus = (self.focus + by) % len(self.runs)

    def changed(self) -> bool:
        return any(run.changed() for run in self.runs) or (self._every and self._time_to_search())

    def refresh(self) -> None:
        """Bring everything up to date."""
        if self._time_to_search():
            self._searched = time.monotonic()
            self._search(all_runs())
        for run in self.runs:
            if run.changed():
                run.refresh()

    def _time_to_search(self) -> bool:
        return time.monotonic() - self._searched >= SEARCH_EVERY

    def _search(self, runs: list[Run]) -> None:
        """Find runs that began meanwhile, and those that work where others do."""
        if self._every:
            known = {run.name for run in self.runs}
            self.runs += [Watched(run.path) for run in runs if run.name not in known and self._began_meanwhile(run)]
        busy = {run.name: _devices(run) for run in runs if _runs_now(run)}
        for run in self.runs:
            here = busy.get(run.name, set())
            run.rivals = tuple(name for name, there in busy.items() if name != run.name and here & there)

    def _began_meanwhile(self, run: Run) -> bool:
        """Whether a run was made, or went on, since we look."""
        for path in (run.events, run.settings):
            try:
                if path.stat().st_mtime >= self._began - 1:
                    return True
            except OSError:
                continue
        return False


def _path(name: str, wait: bool) -> Path:
    try:
        return find_run(name).path
    except RunError:
        if not wait:
            raise
        return Path(name) if len(Path(name).parts) > 1 else RUNS / name


def _runs_now(run: Run) -> bool:
    """Whether a process works on it; without reading its events."""
    return _FollowedRun(run.path).state == "running"


def _devices(run: Run) -> set[str]:
    """Where its towers were put when it started."""
    for event in read_events(run.events):
        if event["type"] == "started" and isinstance(event.get("devices"), dict):
            return {str(place) for place in event["devices"].values()}
    return set()

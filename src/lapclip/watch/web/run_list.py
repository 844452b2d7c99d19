"""All runs, a line each. Only runs of this folder have a name here: no path is ever built from what a browser sends."""

from __future__ import annotations

import time
from typing import Any

from lapclip.runs.folder import ENDED, Run, all_runs
from lapclip.runs.tail import Tail
from lapclip.text import number

YOUNG = 60.0
"""Seconds in which a run that has said nothing yet counts as starting, not as dead."""


class Standing:
    """Where one run stands, told from its events as they come. The events themselves are not kept."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._tail = Tail(run.events)
        self._found_dead: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self._row: dict[str, Any] = {"step": 0, "steps": 0, "best": None, "started": None, "paused": None}
        self._last = ""

    def refresh(self) -> dict[str, Any]:
        """Read what is new, and give the line of this run."""
        new = self._tail.read()
        if self._tail.restarted:
            self._forget()
        for event in new:
            self._take(event)
        return {"name": self.run.name, "state": self._state(), **self._row}

    def _take(self, event: dict[str, Any]) -> None:
        row, kind = self._row, event["type"]
        if kind in (*ENDED, "started", "resumed", "step"):
            self._last = kind
        if kind in (*ENDED, "started", "resumed", "step", "went_on"):
            row["paused"] = None
        match kind:
            case "started" | "resumed":
                row["steps"] = int(number(event.get("steps")) or row["steps"])
                row["started"] = row["started"] or number(event.get("time"))
            case "step":
                row["step"] = int(number(event.get("step")) or 0)
            case "evaluation" if event.get("best") and isinstance(event.get("evaluation"), dict):
                row["best"] = number(event["evaluation"].get("t2i_r1"))
            case "paused":
                row["paused"] = str(event.get("reason") or "asked to")

    def _state(self) -> str:
        """As the run says it. A run found dead is asked again only when its events change: asking reads all of them."""
        if self._last in ENDED:
            return self._last
        try:
            status = self.run.events.stat()
            now = (status.st_mtime_ns, status.st_size)
        except OSError:
            now = (0, 0)
        if now == self._found_dead:
            return "died"
        state = self.run.state
        if state != "died":
            return state
        if not self._last and self._is_young():
            return "starting"
        self._found_dead = now
        return "died"

    def _is_young(self) -> bool:
        try:
            return abs(time.time() - self.run.settings.stat().st_mtime) < YOUNG
        except OSError:
            return False


class Listing:
    """The runs of this folder with their standing."""

    def __init__(self) -> None:
        self._standings: dict[str, Standing] = {}
        self._rows: list[dict[str, Any]] = []
        self._next = 0.0

    def rows(self) -> list[dict[str, Any]]:
        """A line for each run, the newest last. Read at most once a second, however many ask."""
        began = time.monotonic()
        if began < self._next:
            return self._rows
        runs = all_runs()
        self._standings = {run.name: self._standings.get(run.name) or Standing(run) for run in runs}
        self._rows = [self._standings[run.name].refresh() for run in runs]
        taken = time.monotonic() - began
        self._next = began + taken + min(10.0, max(1.0, 50 * taken))
        return self._rows


def run_named(name: str) -> Run | None:
    """The run of this name, if there is one."""
    return next((run for run in all_runs() if run.name == name), None)

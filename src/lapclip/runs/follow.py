"""A run that someone looks at while it goes on: its events so far, kept to what a screen can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lapclip.runs.summary import (Summary, summarise)
from lapclip.runs.tail import Tail

MOST_STEPS = 5000
"""More steps than this are thinned to half of it: a page that is open for a day does not grow."""


class Following:
    """The events of one run, read as they come."""

    def __init__(self, events: Path) -> None:
        self._tail = Tail(events)
        self._steps = 0
        self.events: list[dict[str, Any]] = []
        self.summary: Summary = summarise(())

    def refresh(self) -> list[dict[str, Any]]:
        """Read what is new, give it back, and bring the summary up to date."""
        new = self._tail.read()
        if self._tail.restarted:
            self.events, self._steps = [], 0
        if new or self._tail.restarted:
            self.events += new
            self._steps += sum(1 for event in new if event["type"] == "step")
            if self._steps > MOST_STEPS:
                self.events = thinned(self.events)
                self._steps = sum(1 for event in self.events if event["type"] == "step")
            self.summary = summarise(self.events)
        return new


def thinned(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other step left out, those with and without measured phases alike, but the newest; other events kept."""
    kept, odd = [], {True: False, False: False}
    newest = next((event for event in reversed(events) if event["type"] == "step"), None)
    for event in events:
        if event["type"] == "step" and event is not newest:
            measured = bool(event.get("seconds"))
            odd[measured] = not odd[measured]
            if odd[measured]:
                continue
        kept.append(event)
    return kept

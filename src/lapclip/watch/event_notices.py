"""What happened in a run besides learning: fallbacks, pauses, resumes, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lapclip.runs.summary import Summary
from lapclip.text import duration, number, one_line

BAD = ("fell_back", "failed", "paused")


@dataclass(frozen=True)
class Notice:
    """One thing that happened."""

    type: str
    time: float
    step: int | None
    text: str

    @property
    def bad(self) -> bool:
        return self.type in BAD


def notices(events: Sequence[dict[str, Any]], summary: Summary) -> list[Notice]:
    """All of them in the order of their time; notes of the start come first."""
    found = []
    for event in events:
        if text := text_of(event):
            step = number(event.get("step"))
            time = number(event.get("time")) or 0.0
            found.append(Notice(event["type"], time, None if step is None else int(step), one_line(text)))
    told = {notice.time for notice in found if notice.type == "went_on"}
    for begin, end in summary.pauses:
        if end in told:
            continue
        found.append(Notice("slept", end, None, f"the machine slept for {duration(end - begin)}"))
    return sorted(found, key=lambda notice: notice.time)


def pausing(events: Sequence[dict[str, Any]]) -> str | None:
    """Why the run is paused now, or None if it is not."""
    for event in reversed(events):
        if event["type"] == "paused":
            return one_line(event.get("reason") or "no reason was given")
        if event["type"] in ("went_on", "step", "resumed", "started", "finished", "stopped", "failed"):
            return None
    return None


def text_of(event: dict[str, Any]) -> str:
    """What there is to say of an event; of most kinds, nothing."""
    match event["type"]:
        case "started":
            notes = event.get("notes")
            return "; ".join(map(str, notes)) if isinstance(notes, list) else ""
        case "resumed":
            skipped = event.get("skipped")
            damaged = f"; skipped a damaged checkpoint: {'; '.join(map(str, skipped))}" if skipped else ""
            return f"resumed{damaged}"
        case "fell_back":
            return str(event.get("text") or f"fell back: {event.get('cause') or 'unknown cause'}")
        case "paused":
            return f"paused: {event.get('reason') or 'no reason was given'}"
        case "went_on":
            seconds = number(event.get("seconds"))
            return "went on" if seconds is None else f"went on after {duration(seconds)}"
        case "stopped":
            return f"stopped: {event.get('reason') or 'no reason was given'}"
        case "failed":
            return f"failed: {event.get('error') or 'no reason was given'}"
    return ""

"""Events on disk: appended a line at a time, read back whole lines only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lapclip.errors import RunError
from lapclip.paths import open_own
from lapclip.runs.events import Event
from lapclip.suggest import command

Listener = Callable[[Event], None]
LONGEST_LINE = 4_000_000
"""Bytes of a line; a longer one is no event, and is passed over without being held."""


class EventLog:
    """Appends events to a file and tells listeners of each."""

    def __init__(self, path: Path, *listeners: Listener) -> None:
        self.path = path
        self.listeners = listeners
        try:
            _drop_half_line(path)
            self._file = open_own(path, "a", encoding="utf-8")  # open as long as the run
        except OSError as error:
            raise self._cannot_write(error) from error

    def append(self, event: Event) -> None:
        """Write one line and hand it to the system, so that a killed process loses none of its events."""
        try:
            self._file.write(json.dumps(event.to_dict(time.time()), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error
        for listener in self.listeners:
            listener(event)

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(
            f"Cannot write to {self.path}: {error.strerror or error}.",
            hint=f"free some disk space, then {command('resume', self.path.parent.name)}",
        )

    def close(self) -> None:
        """Close the file; what cannot be written any more has been reported by `append`."""
        try:
            self._file.close()
        except OSError:
            pass


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events so far. A half-written last line and damaged lines are passed over."""
    try:
        file = open_own(path)
    except OSError:
        return
    with file:
        for line in _whole_lines(file):
            event = parse_line(line.decode("utf-8", errors="replace"))
            if event is not None:
                yield event


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines that end, and are no longer than an event may be."""
    at_its_begin = True
    while part := file.readline(LONGEST_LINE):
        ends = part.endswith(b"\n")
        if ends and at_its_begin:
            yield part
        at_its_begin = ends


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The event of a line; None where it is rubbish, or nested too deep to be read."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if is_event(event) else None


def is_event(value: Any) -> bool:
    """Whether something that was read is an event, of whatever kind."""
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary, else an empty one: a file may come from another version, or be damaged."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The dictionaries of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _drop_half_line(path: Path) -> None:
    """Remove what a killed process had begun to write, so that the next event starts on a line of its own."""
    if not path.exists():
        return
    with open_own(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)

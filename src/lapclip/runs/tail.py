"""A run's events as they are being written, for whoever looks on from another process.

A long run has a million lines. Of a large file every line that is not a step is read, and steps at even distances: what
a screen can show. What is appended later is read line by line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

WHOLE = 3_000_000
"""Bytes up to which a file is simply read."""
SAMPLES = 2000
"""Steps that are taken of a larger one."""
HEAD = 200_000
"""Bytes at the beginning and the end in which no line is left out."""
CHUNK = 1_000_000
BATCH = 200
"""Lines that are read together."""

_NOT_STEPS = re.compile(rb'\n\{"v":\d+,"type":"(?!step")')


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
            with open(self.path, "rb") as file:
                return self._read(file)
        except OSError:  # not there yet, or not any more
            return []

    def _read(self, file: BinaryIO) -> list[dict[str, Any]]:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity) or status.st_size < self._position:
            self._position, self.restarted = 0, True
        self._identity = identity
        if status.st_size == self._position:
            return []
        if status.st_size - self._position > WHOLE:
            lines, self._position = _sampled(file, self._position, status.st_size)
        else:
            file.seek(self._position)
            text = file.read(status.st_size - self._position)
            end = text.rfind(b"\n") + 1  # the rest is half a line
            lines, self._position = text[:end].splitlines(), self._position + end
        return list(_parsed(lines))


def _sampled(file: BinaryIO, start: int, size: int) -> tuple[list[bytes], int]:
    """Lines of a large file in order: all that are not steps, steps at even distances, and the place after the last."""
    lines: list[bytes] = []
    position, rest, apart = start, b"", (size - start) // SAMPLES
    file.seek(start)
    while chunk := file.read(min(CHUNK, size - position - len(rest))):
        text = rest + chunk
        end = text.rfind(b"\n") + 1
        near_an_end = position < start + HEAD or position + end > size - HEAD
        begins = _line_begins(text, end) if near_an_end else _some_begins(text, end, apart)
        lines += [text[at : text.index(b"\n", at)] for at in sorted(begins)]
        position, rest = position + end, text[end:]
    return lines, position


def _line_begins(text: bytes, end: int) -> set[int]:
    begins, at = set(), 0
    while at < end:
        begins.add(at)
        at = text.index(b"\n", at) + 1
    return begins


def _some_begins(text: bytes, end: int, apart: int) -> set[int]:
    """Of all lines that are not steps, and of the first line after each stretch of so many bytes."""
    begins = {match.start() + 1 for match in _NOT_STEPS.finditer(text, 0, end)} | ({0} if end else set())
    for place in range(apart, end, apart):
        at = text.index(b"\n", place - 1) + 1 if place <= end else end
        if at < end:
            begins.add(at)
    return begins


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Damaged lines are passed over."""
    for first in range(0, len(lines), BATCH):
        for event in _read_together(lines[first : first + BATCH]):
            if isinstance(event, dict) and isinstance(event.get("type"), str):
                yield event


def _read_together(lines: list[bytes]) -> list[Any]:
    """Lines as one list: what is read at once shares the names of its fields, which are half of its memory."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        found = []
    return found if len(found) == len(lines) else [event for line in lines for event in _read_alone(line)]


def _read_alone(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []

"""Lines of text files in whatever encoding people have: UTF-8 with or without a mark, UTF-16, and Windows-1252 last."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 1_000_000
"""Characters. What is longer is cut there, so that a file without line ends does not fill the memory."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNDECODED = re.compile("[\udc80-\udcff]")


def _as_windows(found: re.Match[str]) -> str:
    return bytes([ord(found[0]) - 0xDC00]).decode("cp1252", "replace")


def decode(data: bytes) -> str:
    """A short text. Bytes that are not UTF-8 are read as Windows-1252."""
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "")
    if encoding and encoding != "utf-8-sig":
        return data.decode(encoding, "replace").removeprefix("\ufeff")
    return _UNDECODED.sub(_as_windows, data.decode(encoding or "utf-8", "surrogateescape"))


class Lines:
    """The lines of a file with their numbers, counted from 1, and what was met on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.encoding = "utf-8"
        self.repaired = 0
        """Lines with bytes that are not UTF-8."""
        self.cut: set[int] = set()
        """Numbers of the lines that were too long and are cut off."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self.repaired, self.cut = 0, set()
        with open(self.path, "rb") as raw:
            start = raw.read(4)
            self.encoding = next((name for mark, name in _MARKS if start.startswith(mark)), "utf-8")
            raw.seek(0)
            errors = "surrogateescape" if self.encoding.startswith("utf-8") else "replace"
            with io.TextIOWrapper(raw, encoding=self.encoding, errors=errors, newline="") as file:
                number = 0
                while line := file.readline(LONGEST_LINE):
                    number += 1
                    if len(line) == LONGEST_LINE and line[-1] not in "\r\n":
                        self.cut.add(number)
                        while (more := file.readline(LONGEST_LINE)) and more[-1] not in "\r\n":
                            pass
                    if not line.isascii() and _UNDECODED.search(line):
                        self.repaired += 1
                        line = _UNDECODED.sub(_as_windows, line)
                    yield number, line

    def notes(self) -> list[str]:
        """What the user should know about the encoding."""
        notes = [] if self.encoding.startswith("utf-8") else [f"read as {self.encoding.upper()}"]
        if self.repaired:
            notes.append(f"{self.repaired:,} lines are not UTF-8 and were read as Windows-1252")
        return notes

"""Index of a packed store: what is known of each image that was read once.

index.jsonl   a line for each image, only ever appended to; the last line of a name counts
pixels.bin    the squares of the images one after another; lines say in which row
lock          held by the process that writes

A line is written after its pixels have reached the disk, so whatever a killed process leaves is true as far as it goes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from lapclip.paths import digest_of_bytes, make_private

INDEX, PIXELS, LOCK = "index.jsonl", "pixels.bin", "lock"
NOT_STORED = -1


def digest_of(data: bytes) -> str:
    """Return what identifies the bytes of a file: the first half of their SHA-256."""
    return digest_of_bytes(data)[:32]


@dataclass(frozen=True)
class Entry:
    """An image as it was when it was read."""

    name: str
    stamp: str
    digest: str = ""
    """Of the bytes of its file: the first half of its SHA-256."""
    row: int = NOT_STORED
    """Where its pixels are; images with the same bytes share a row."""
    width: int = 0
    height: int = 0
    broken: str = ""
    """Why it cannot be used; empty where it can."""
    content: str = ""
    """What identifies the image in the file, whatever is written beside it; only where images are compared."""
    signature: str = ""
    """What is compared with other images to find near copies; only where images are compared."""

    @property
    def aspect(self) -> float:
        """Width to height."""
        return self.width / self.height


class PackedIndex:
    """The lines of a folder, read once; whoever writes holds the lock."""

    def __init__(self, folder: Path, row_bytes: int) -> None:
        self.folder, self.row_bytes = folder, row_bytes
        self.entries: dict[str, Entry] = {}
        self.rows = 0
        """Number of rows in the file of pixels, used or not."""
        self.pixels = folder / PIXELS

    @contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Wait for other processes, calling `waiting` each second, and keep them out until the end."""
        make_private(self.folder)
        lock = filelock.FileLock(self.folder / LOCK)
        while True:
            try:
                lock.acquire(timeout=1)
                break
            except filelock.Timeout:
                waiting()
        try:
            yield
        finally:
            lock.release()

    def open(self) -> None:
        """Read the lines up to the first one that is damaged, and cut the file off there."""
        stored_rows = 0
        with suppress(FileNotFoundError):
            stored_rows = self.pixels.stat().st_size // self.row_bytes
        valid_bytes = 0
        with suppress(FileNotFoundError), open(self.folder / INDEX, "rb+") as file:
            for line in file:
                entry = _parse_entry(line)
                if entry is None:
                    break
                valid_bytes += len(line)
                if entry.row < stored_rows:
                    self.entries[entry.name] = entry
                    self.rows = max(self.rows, entry.row + 1)
                else:  # its pixels never reached the disk
                    self.entries.pop(entry.name, None)
            file.truncate(valid_bytes)

    def append(self, entries: Sequence[Entry]) -> None:
        """Add lines. Their pixels must be on the disk."""
        with open(self.folder / INDEX, "ab") as file:
            for entry in entries:
                values = {key: value for key, value in asdict(entry).items() if value != ""}
                file.write(json.dumps(values).encode() + b"\n")
                self.entries[entry.name] = entry
                self.rows = max(self.rows, entry.row + 1)
            file.flush()
            os.fsync(file.fileno())


def _parse_entry(line: bytes) -> Entry | None:
    """Return the entry of a line. None if the line is damaged."""
    try:
        values = json.loads(line) if line.endswith(b"\n") else {}
        entry = Entry(**values)
    except (ValueError, TypeError, AttributeError):
        return None
    texts = (entry.name, entry.stamp, entry.digest, entry.broken, entry.content, entry.signature)
    numbers = (entry.row, entry.width, entry.height)
    if not all(isinstance(text, str) for text in texts):
        return None
    if not all(isinstance(number, int) for number in numbers):
        return None
    has_size = min(entry.width, entry.height) > 0
    return entry if entry.broken or has_size else None

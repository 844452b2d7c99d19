"""What is known of each image that was read once: one JSON line an image, only ever appended to.

index.jsonl     first the name of the file of pixels, then a line an image; the last line of a name counts
pixels-N.bin    the images one after another, each as large as the others; lines say in which row
lock            held by the process that writes

A line is written after its pixels have reached the disk, so whatever a killed process leaves is true as far as it goes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from lapclip.paths import digest_of_bytes, make_private, write_atomic

INDEX, LOCK = "index.jsonl", "lock"
NOT_STORED = -1


def digest_of(data: bytes) -> str:
    """What identifies the bytes of a file."""
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
    marks: tuple[str, ...] = ()
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
        """Rows in the file of pixels, whether or not an image still uses them."""
        self.pixels = folder / "pixels-1.bin"

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
        """Read what is there, up to the first line that is not whole; that and what follows is cut off."""
        index = self.folder / INDEX
        good, room = 0, 0
        with suppress(FileNotFoundError), open(index, "rb") as file:
            header = _parsed(file.readline())
            named = header.get("pixels") if header else None
            if isinstance(named, str) and named == Path(named).name:
                self.pixels, good = self.folder / named, file.tell()
                room = self.pixels.stat().st_size // self.row_bytes if self.pixels.exists() else 0
                for line in file:
                    entry = _entry(_parsed(line))
                    if entry is None:
                        break
                    good += len(line)
                    if entry.row < room:  # else its pixels were lost with the power
                        self.entries[entry.name] = entry
                        self.rows = max(self.rows, entry.row + 1)
                    else:
                        self.entries.pop(entry.name, None)
        if good:
            if good < index.stat().st_size:
                os.truncate(index, good)
        else:
            self._write_anew(self.pixels, [])
        self._sweep()

    def append(self, entries: Iterable[Entry]) -> None:
        """Add lines. Their pixels must be on the disk."""
        entries = list(entries)
        with open(self.folder / INDEX, "ab") as file:
            file.write(_lines(map(_as_dict, entries)))
            file.flush()
            os.fsync(file.fileno())
        self.entries.update((entry.name, entry) for entry in entries)
        self.rows = max([self.rows, *(entry.row + 1 for entry in entries)])

    def next_pixels(self) -> Path:
        """A name for a file of pixels that takes the place of the present one."""
        return self.folder / f"pixels-{int(self.pixels.stem.rpartition('-')[2]) + 1}.bin"

    def replace(self, pixels: Path, entries: Iterable[Entry]) -> None:
        """Use another file of pixels with other lines from here on."""
        entries = list(entries)
        self._write_anew(pixels, entries)
        self.pixels, self.entries = pixels, {entry.name: entry for entry in entries}
        self.rows = max([0, *(entry.row + 1 for entry in entries)])
        self._sweep()

    def _write_anew(self, pixels: Path, entries: Iterable[Entry]) -> None:
        lines = _lines([{"pixels": pixels.name}, *map(_as_dict, entries)])
        write_atomic(self.folder / INDEX, lines, durable=True)

    def _sweep(self) -> None:
        """Remove what killed processes left. Windows keeps files that another process still reads: next time."""
        for stale in [*self.folder.glob("*.partial"), *self.folder.glob("pixels-*.bin")]:
            if stale != self.pixels:
                with suppress(OSError):
                    stale.unlink()


def _as_dict(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if value not in ("", ())}


def _lines(objects: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in objects)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _entry(values: dict[str, Any] | None) -> Entry | None:
    try:
        values = values or {}
        entry = Entry(**{**values, "marks": tuple(values.get("marks", ()))})
    except TypeError:
        return None
    texts = (entry.name, entry.stamp, entry.digest, entry.broken, entry.content, entry.signature)
    numbers = (entry.row, entry.width, entry.height)
    sound = all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int) for number in numbers
    )
    return entry if sound and (entry.broken or min(entry.width, entry.height) > 0) else None

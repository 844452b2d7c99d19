"""The images of the index, small and whole, and no other files.

What is sent is what was indexed: a file that changed since, or stands where another one did, is not. Small images
are made once and cached beside the index, by the content of the image, so a renamed one keeps its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
from typing import NamedTuple

from PIL import Image

from lapclip.data.decode import decode, read_header
from lapclip.data.packed_index import digest_of
from lapclip.errors import DataError
from lapclip.paths import write_atomic
from lapclip.searching.index import SMALL, Entry, thumbnail_path
from lapclip.searching.library import Library

SHORT_SIDE = 320
"""Of a small image; a long one is at most twice as long."""
WHOLE_SIDE = 4096
"""Long side of a whole image that had to be converted."""
MOST_CACHED = 1_000_000_000
"""Bytes of small images that are cached. Those made first go first."""
BROWSERS_READ = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "AVIF": "image/avif",
}
"""Formats that are sent as they are. No format here can hold a script."""


class Sent(NamedTuple):
    """An image on its way to the browser."""

    data: bytes
    kind: str


class Images:
    """Reads images by what the index knows of them. Threads may share it."""

    def __init__(self, library: Library) -> None:
        self._library, self._cached = library, library.index_path / SMALL
        threading.Thread(target=self._make_room, daemon=True).start()

    def is_there(self, entry: Entry) -> bool:
        """Whether the file is still what was indexed."""
        try:
            status = os.stat(self._library.path(entry))
        except (OSError, ValueError):
            return False
        same = stat.S_ISREG(status.st_mode) and status.st_size == entry.bytes
        return same and (status.st_mtime_ns == entry.modified or self._read(entry) is not None)

    def small(self, entry: Entry) -> Sent | None:
        """A small JPEG; None where the file is gone, changed, or cannot be decoded any more."""
        path = thumbnail_path(self._library.index_path, entry.digest)
        if not self.is_there(entry):
            return None
        with contextlib.suppress(OSError):
            return Sent(path.read_bytes(), "image/jpeg")
        data = self._read(entry)
        if data is None:
            return None
        try:
            made = as_jpeg(shrunk(decode(data, SHORT_SIDE).image))
        except DataError:
            return None
        with contextlib.suppress(OSError):  # a full disk: it is made again the next time
            if not self._library.is_removed:  # forgotten images are not brought back
                for folder in (self._cached, path.parent):
                    folder.mkdir(0o700, exist_ok=True)
                write_atomic(path, made)
        return Sent(made, "image/jpeg")

    def whole(self, entry: Entry) -> Sent | None:
        """The image as its file has it, or as a JPEG where browsers cannot read that."""
        data = self._read(entry)
        if data is None:
            return None
        try:
            header = read_header(data)
            if kind := BROWSERS_READ.get(header.image.format or ""):
                return Sent(data, kind)
            image = shrunk(decode(header).image, WHOLE_SIDE, WHOLE_SIDE)
            return Sent(as_jpeg(image, quality=90), "image/jpeg")
        except DataError:
            return None

    def _read(self, entry: Entry) -> bytes | None:
        """The bytes that were indexed; None where the file holds others."""
        path = self._library.path(entry)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
                return None
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != entry.bytes:
                    return None
                data = file.read(entry.bytes + 1)
        except (OSError, ValueError, MemoryError):
            return None
        return data if digest_of(data) == entry.digest else None

    def _make_room(self) -> None:
        with contextlib.suppress(OSError):
            found = [(path.stat(), path) for path in self._cached.glob("*/*")]
            found.sort(key=lambda each: each[0].st_mtime)
            excess = sum(status.st_size for status, _ in found) - MOST_CACHED
            for status, path in found:
                if excess <= 0:
                    break
                path.unlink(missing_ok=True)
                excess -= status.st_size


def shrunk(
    image: Image.Image, short_side: int = SHORT_SIDE, long_side: int | None = None
) -> Image.Image:
    """An image with at most this short side, and at most twice that or `long_side` as the long one."""
    share = min(1.0, short_side / min(image.size), (long_side or 2 * short_side) / max(image.size))
    if share == 1.0:
        return image
    width, height = (max(1, round(side * share)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)


def as_jpeg(image: Image.Image, quality: int = 80) -> bytes:
    """An image as a JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()

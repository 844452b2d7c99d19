"""What identifies the image in a file, whatever is written beside it.

Programs write captions, ratings and dates into image files, so copies of one image seldom have the same bytes. Here
only what the pixels are made from counts. It is compared as it is stored: decoded pixels differ by a step between
releases of a decoder, and splits that are drawn from them would then differ between two computers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

PNG = b"\x89PNG\r\n\x1a\n"
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT")
SCAN = 0xDA
"""The marker of a JPEG after which its pixels come."""


def content_of(data: bytes) -> str:
    """The first half of the SHA-256 of an image's stored pixels. Of a form whose parts are not known here, and of a
    damaged file, all bytes count."""
    digest = hashlib.sha256()
    for part in _png_pixels(data) or _jpeg_pixels(data) or [data]:
        digest.update(part)
    return digest.hexdigest()[:32]


def _png_pixels(data: bytes) -> list[memoryview]:
    """The chunks of a PNG that hold pixels; none where it is no whole PNG."""
    if not data.startswith(PNG):
        return []
    view, at, found = memoryview(data), len(PNG), []
    while at + 12 <= len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in PIXEL_CHUNKS:
            found.append(view[at + 4 : at + 8 + size])
        at += 12 + size
        if kind == b"IEND":
            return found
    return []


def _jpeg_pixels(data: bytes) -> list[memoryview]:
    """The segments of a JPEG from which pixels are made; none where it is no JPEG."""
    if not data.startswith(b"\xff\xd8"):
        return []
    view, found = memoryview(data), []
    for marker, begin, end in jpeg_segments(data):
        if not (0xE0 <= marker <= 0xEF or marker == 0xFE):  # notes of applications, and comments
            found.append(view[begin:end])
        if marker == SCAN:
            return found
    return []


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The segments of a JPEG, each with its marker, where it begins and where it ends; the last is its first scan with
    all that follows. Where they cannot be told any further, they end before."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # any number of them may come before a marker
            at += 1
            continue
        if marker == SCAN:
            yield marker, at, len(data)
            return
        alone = marker == 0x01 or 0xD0 <= marker <= 0xD8
        end = at + 2 + (0 if alone else int.from_bytes(data[at + 2 : at + 4], "big"))
        yield marker, at, end
        at = end

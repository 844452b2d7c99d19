"""One look at every image: its bytes are read once, in threads, and what is kept of it is small."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lapclip.data.decode import decode
from lapclip.data.decode import look as read_header
from lapclip.data.packed_index import digest_of
from lapclip.data.table import StoredImage
from lapclip.data_check.similar_images import GREY_SIDE, fingerprint
from lapclip.errors import DataError
from lapclip.machine.facts import logical_cores
from lapclip.progress import Progress

AT_ONCE = 512
"""Images handed to the threads at a time, so that progress is shown and an interrupt is heard."""


@dataclass(frozen=True)
class Seen:
    """What is kept of an image."""

    digest: str
    """Of its bytes."""
    size: int
    """Bytes of the file."""
    fault: str = ""
    """Why it cannot be read; then the rest is empty."""
    width: int = 0
    height: int = 0
    marks: frozenset[str] = frozenset()
    hash: int = 0
    thumbnail: bytes = b""


def look(data: bytes) -> Seen:
    """Everything that is to be known about an image, from its bytes."""
    digest = digest_of(data)
    try:
        header = read_header(data)
        with header.turn():
            decoded = decode(header, 2 * GREY_SIDE)
    except DataError as error:
        return Seen(digest, len(data), fault=error.message)
    hashed, thumbnail = fingerprint(decoded.image)
    return Seen(digest, len(data), "", decoded.width, decoded.height, decoded.marks, hashed, thumbnail)


def look_at_all(images: Sequence[StoredImage], progress: Progress | None = None) -> list[Seen]:
    """Every image, in order; those that cannot be read say why."""
    seen: list[Seen] = []
    with ThreadPoolExecutor(logical_cores(), thread_name_prefix="lapclip-survey") as pool:
        for at in range(0, len(images), AT_ONCE):
            seen += pool.map(_read, images[at : at + AT_ONCE])
            if progress:
                progress(len(seen), len(images))
    return seen


def _read(picture: StoredImage) -> Seen:
    try:
        data = picture.read()
    except OSError as error:
        return Seen("", 0, fault=(error.strerror or str(error) or type(error).__name__).lower())
    return look(data)

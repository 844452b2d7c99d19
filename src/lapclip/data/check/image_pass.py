"""One pass over every image: its bytes are read once, in threads, and only a few facts of it are kept."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lapclip.data.copies import SIGNATURE_SIDE, content_of, hash_and_thumbnail, signature_text
from lapclip.data.decode import NO_MEMORY, decode, read_header
from lapclip.data.packed_index import digest_of
from lapclip.data.table import StoredImage
from lapclip.errors import DataError
from lapclip.machine.facts import logical_cores
from lapclip.progress import Progress

AT_ONCE = 512
"""Images handed to the threads at a time, so that progress is shown and an interrupt is heard."""


@dataclass(frozen=True)
class ImageFacts:
    """What is known of an image after the pass."""

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
    content: str = ""
    """Of the image, whatever is written beside it in its file."""

    @property
    def signature(self) -> str:
        """The hash and the thumbnail as one text."""
        return signature_text(self.hash, self.thumbnail)


def inspect_image(data: bytes) -> ImageFacts:
    """Everything that is to be known about an image, from its bytes."""
    digest = digest_of(data)
    try:
        header = read_header(data)
        with header.turn(SIGNATURE_SIDE):
            decoded = decode(header, SIGNATURE_SIDE)
    except DataError as error:
        return ImageFacts(digest, len(data), fault=error.message)
    hashed, thumbnail = hash_and_thumbnail(decoded.image)
    marks, content = decoded.marks, content_of(data)
    return ImageFacts(digest, len(data), "", decoded.width, decoded.height, marks, hashed, thumbnail, content)


def inspect_images(images: Sequence[StoredImage], progress: Progress | None = None) -> list[ImageFacts]:
    """The facts of every image, in order; those that cannot be read say why."""
    facts: list[ImageFacts] = []
    with ThreadPoolExecutor(logical_cores(), thread_name_prefix="lapclip-check") as pool:
        for at in range(0, len(images), AT_ONCE):
            facts += pool.map(_read, images[at : at + AT_ONCE])
            if progress:
                progress(len(facts), len(images))
    return facts


def _read(image: StoredImage) -> ImageFacts:
    try:
        return inspect_image(image.read())
    except MemoryError:
        return ImageFacts("", 0, fault=NO_MEMORY)
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return ImageFacts("", 0, fault=why[:1].lower() + why[1:])

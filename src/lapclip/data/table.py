"""What a source lists before any image is opened: which images there are, their captions and their splits."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from lapclip.text import printable


class StoredImage(Protocol):
    """Where the bytes of an image are. Reading is the expensive part, so it happens late and in threads."""

    @property
    def name(self) -> str:
        """How a person finds it: the path below the data's folder, or `shard.tar:member`. Unique in a table."""
        ...

    def stamp(self) -> str:
        """Changes when the image does, without reading it. Raises OSError where there is no such file."""
        ...

    def read(self) -> bytes:
        """The encoded image. Raises OSError where it cannot be read."""
        ...


def file_stamp(path: Path) -> str:
    """Changes when a file does. A file may be swapped for one of the same size and date: its number then tells, or the
    time of its last change of any kind. Where a system has neither, they stay as they are and do no harm."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image in a file of its own."""

    path: Path
    name: str

    def stamp(self) -> str:
        return file_stamp(self.path)

    def read(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True, slots=True)
class ImageInTar:
    """An image inside a larger file, such as a member of a tar: read where it lies, never extracted."""

    path: Path
    offset: int
    size: int
    name: str

    def stamp(self) -> str:
        return f"{file_stamp(self.path)} {self.offset} {self.size}"

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            found = file.read(self.size)
        if len(found) < self.size:
            raise OSError(f"{self.name} ends too early")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class DrawnImage:
    """An image that was drawn, as the file it could be."""

    name: str
    pixels: np.ndarray

    def stamp(self) -> str:
        return self.name

    def read(self) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.asarray(self.pixels)).save(file, "PNG", compress_level=1)
        return file.getvalue()


@dataclass(frozen=True, slots=True)
class Row:
    """An image, its captions, and the split the data gives it; an empty split is decided by `splits`."""

    image: StoredImage
    captions: tuple[str, ...]
    split: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something in the data that is left out: where it is, as a person finds it, and why. Both are printable."""

    where: str
    why: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", printable(self.where))
        object.__setattr__(self, "why", printable(self.why))


@dataclass(frozen=True)
class Table:
    """A source as read. Each image has one row, with all its captions; what was left out is counted and named.

    Nothing is lost without a word: `records` is the captions of the rows, plus `repeated`, plus `skipped`.
    """

    rows: Sequence[Row]
    kind: str
    """The form it was recognised as, such as `captions.csv` or `class folders`."""
    how: str
    """One line for the user: what was recognised and what was guessed, such as columns and their separator."""
    skipped: Sequence[Skipped] = field(default_factory=list)
    classes: Sequence[str] = ()
    """The names of the classes, where the source is a folder of class folders; else empty."""
    labels: Sequence[int] = ()
    """The class of each row, as its index in `classes`; empty where there are none."""
    records: int = 0
    """What the source names: each caption of an image, and each image or line that has none."""
    repeated: int = 0
    """Captions that the same image has already."""

    def too_broken(self, broken: int, limit: float) -> tuple[bool, bool]:
        """Whether more than a share of the images, of which so many turned out to be broken, and whether more than
        that share of the records cannot be used. They are judged apart: an image may have any number of captions."""
        return broken > limit * len(self.rows), len(self.skipped) > limit * self.records

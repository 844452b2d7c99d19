"""The table of a source, before any image is opened: images, their captions and their splits.

A source collects its rows in a `RowCollector`: one for each image, each caption once, and what is left out.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from lapclip.config import DataConfig
from lapclip.data.splits import TRAIN, assign_splits, check_trainable, split_named
from lapclip.errors import DataError
from lapclip.paths import check_size, read_bytes
from lapclip.suggest import command, source_word
from lapclip.text import counted, printable


class StoredImage(Protocol):
    """Where the bytes of an image are. Reading is the expensive part, so it happens late and in threads."""

    @property
    def name(self) -> str:
        """How a person finds it: the path below the data's folder, or `shard.tar:member`. Unique in a table."""
        ...

    @property
    def path(self) -> Path | None:
        """The file that it lies in, perhaps with others; None where it is drawn."""
        ...

    def stamp(self) -> str:
        """Changes when the image does, without reading it. Raises OSError where there is no such file."""
        ...

    def read(self) -> bytes:
        """The encoded image. Raises OSError where it cannot be read or is too large to be."""
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
        return read_bytes(self.path)


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
        check_size(self.size)
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
    path: Path | None = None

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


def reasons(skipped: Sequence[Skipped]) -> dict[str, list[str]]:
    """Where each reason occurs, the commonest first."""
    found: dict[str, list[str]] = {}
    for one in skipped:
        found.setdefault(one.why, []).append(one.where)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


@dataclass(frozen=True)
class UsedColumns:
    """The columns of a table that are read, by name."""

    images: str
    captions: tuple[str, ...]
    split: str | None = None
    contents: str = "file names"
    """Contents of the column of images: "file names", or "images" if it holds their bytes."""

    def describe(self, count: int) -> str:
        """Describe what each column holds, with the number of images."""
        parts = [f'column "{column_title(self.images)}" holds {count:,} {self.contents}: images']
        for names, role in ((self.captions, "captions"), ((self.split,), "splits")):
            titles = [f'"{column_title(name)}"' for name in names if name is not None]
            if titles:
                word = "column" if len(titles) == 1 else "columns"
                parts.append(f"{word} {', '.join(titles)}: {role}")
        return "; ".join(parts)


MAX_TITLE_LENGTH = 40


def column_title(name: str) -> str:
    """Return the name of a column for a message: short, on one line, without control characters."""
    return printable(name)[:MAX_TITLE_LENGTH]


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
    columns: Mapping[UsedColumns, int] = field(default_factory=dict)
    """Columns that were read, with the number of their images. Empty if the source has no columns."""

    def too_broken(self, broken: int, limit: float) -> tuple[bool, bool]:
        """Whether more than a share of the images, of which so many turned out to be broken, and whether more than
        that share of the records cannot be used. They are judged apart: an image may have any number of captions."""
        return broken > limit * len(self.rows), len(self.skipped) > limit * self.records

    def share_needed(self, broken: int) -> float:
        """The smallest whole per cent at which neither is too much."""
        shares = (broken / max(1, len(self.rows)), len(self.skipped) / max(1, self.records))
        return next((cent / 100 for cent in range(100) if cent / 100 >= max(shares)), 1.0)


_NUMBER = re.compile(r"[-+]?[\d.,:/ ]*\d[\d.,:/ ]*")


def is_number(text: str) -> bool:
    """Return whether a text is nothing but a number, a date or a time."""
    return bool(_NUMBER.fullmatch(text))


def number_captions(rows: Sequence[Row]) -> list[str]:
    """Return the captions that are nothing but a number."""
    return [caption for row in rows for caption in row.captions if is_number(caption)]


def note_on_numbers(rows: Sequence[Row]) -> str:
    """Return a warning where most captions are numbers, else an empty text."""
    numbers, total = number_captions(rows), sum(len(row.captions) for row in rows)
    if len(numbers) <= total / 2:
        return ""
    example = numbers[0][:40]
    return (
        f"{len(numbers):,} of {total:,} captions are numbers, such as {example!r}: they say little about an image; "
        "--set data.caption_column=NAME chooses another column"
    )


MAX_EXAMPLES = 3  # of each kind in a message


def check_table(config: DataConfig, table: Table) -> None:
    """Refuse what can be refused before any image is read.

    That is too many rows that cannot be used, or nothing to train on or to choose the best model with. What copies and
    broken images change is known later.
    """
    check_broken(config, table, [])
    check_enough(config, count_for_training(table.rows))
    check_trainable(assign_splits(table.rows, config.seed, held_out=config.held_out))


def count_for_training(rows: Sequence[Row]) -> int:
    """Return the number of images, without those that the data itself holds out."""
    return sum(row.split in ("", TRAIN) for row in rows)


def check_enough(config: DataConfig, pairs: int) -> None:
    """Refuse data with fewer images for training than `data.min_pairs`."""
    if 0 < pairs < config.min_pairs:  # none at all has a message of its own
        source = printable(source_word(config.source))
        raise DataError(
            f"Training needs at least {config.min_pairs:,} pairs; {source} has {pairs:,}.",
            hint="more images with captions, or --set data.min_pairs=2",
        )


def check_broken(config: DataConfig, table: Table, broken: Sequence[Skipped]) -> None:
    """Refuse data of which too many rows cannot be used, or too many images. `broken` are the broken images so far."""
    too_many_images, too_many_rows = table.too_broken(len(broken), config.broken_share)
    if too_many_images:
        what, left_out = f"{len(broken):,} of {len(table.rows):,} images", broken
    elif too_many_rows:
        what, left_out = f"{len(table.skipped):,} of {table.records:,} rows", table.skipped
    else:
        return
    enough = f"--set data.broken_share={table.share_needed(len(broken)):g}"
    raise DataError(
        f"{what} cannot be used, more than {config.broken_share:.0%}: {by_reason(left_out)}.",
        hint=f"{command('data', 'check', config.source)}, or {enough} to go on with the others",
    )


def by_reason(skipped: Sequence[Skipped]) -> str:
    """Describe how many entries were left out for each reason, the most common first, with examples."""
    texts = []
    for why, places in reasons(skipped).items():
        texts.append(f"{len(places):,} because {why} ({some(places)})")
    more = ""
    if len(texts) > MAX_EXAMPLES:
        more = f"; {counted(len(texts) - MAX_EXAMPLES, 'other reason')}"
    return "; ".join(texts[:MAX_EXAMPLES]) + more


def some(texts: Sequence[str]) -> str:
    """Return the first of some texts, and how many more there are."""
    listed = ", ".join(texts[:MAX_EXAMPLES])
    if len(texts) > MAX_EXAMPLES:
        return f"{listed} and {len(texts) - MAX_EXAMPLES:,} more"
    return listed


MAX_CAPTION_LENGTH = 20_000  # characters; what is longer is no caption but a damaged file
_split_named = lru_cache(maxsize=256)(split_named)
# Spaces, line ends, control characters, halves of characters and byte order marks.
_UNSEEN = re.compile(r"[\x00-\x20\x7f-\x9f\ud800-\udfff\ufeff]+")


def clean_caption(text: str) -> str:
    """Return a caption on one line: control characters and runs of spaces become one space."""
    return _UNSEEN.sub(" ", text).strip()


@dataclass
class CollectedRow:
    """An image with what was collected of it so far."""

    image: StoredImage
    split: str
    captions: dict[str, None] = field(default_factory=dict)


class RowCollector:
    """Collects the rows of a source. Each call of `add` or `skip` counts one record.

    With `with_splits` off, splits that the data names are ignored, so that new ones are drawn.
    """

    def __init__(self, *, with_splits: bool = True) -> None:
        self._with_splits = with_splits
        self._rows: dict[str, CollectedRow] = {}
        self._labels: dict[str, str] = {}
        self.skipped: list[Skipped] = []
        self.records = 0
        self.repeated = 0
        self.columns: Counter[UsedColumns] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def skip(self, where: str, why: str) -> None:
        """Leave one record out and name it."""
        self.records += 1
        self.skipped.append(Skipped(where, why))

    def add(self, image: StoredImage | str, caption: str, split: str, where: str) -> None:
        """Add one caption of an image. Instead of an image there may be the reason why there is none."""
        if isinstance(image, str):
            return self.skip(where, image)
        caption = clean_caption(caption)
        if not caption:
            return self.skip(where, "the caption is empty")
        if len(caption) > MAX_CAPTION_LENGTH:
            why = f"the caption has {len(caption):,} characters, more than {MAX_CAPTION_LENGTH:,}"
            return self.skip(where, why)
        named_split = ""
        if self._with_splits and split.strip():
            named_split = _split_named(split) or ""
            if not named_split:
                why = f"the split {split.strip()[:40]!r} is none of train, val, test"
                return self.skip(where, why)
        row = self._rows.setdefault(image.name, CollectedRow(image, named_split))
        if named_split and row.split and row.split != named_split:
            # An image in two splits would be trained on and scored on; the first one that is named keeps it.
            return self.skip(where, f"the image is in {row.split} already, here in {named_split}")
        row.split = row.split or named_split
        self.records += 1
        self.repeated += caption in row.captions
        row.captions[caption] = None
        return None

    def holds(self, name: str) -> bool:
        """Return whether an image of this name has a caption already."""
        return name in self._rows

    def label(self, name: str, label: str) -> None:
        """Set the class of an image, if the source has classes."""
        self._labels[name] = label

    def table(self, kind: str, how: str) -> Table:
        """Return what was collected. Raises DataError with the most common reason if that is nothing."""
        if not self._rows:
            raise self._nothing(kind)
        names = [self._labels[name] for name in self._rows] if self._labels else []
        classes = {name: index for index, name in enumerate(dict.fromkeys(names))}
        described = [used.describe(count) for used, count in self.columns.items()]
        return Table(
            [Row(row.image, tuple(row.captions), row.split) for row in self._rows.values()],
            kind,
            "; ".join([how, *described]),
            self.skipped,
            list(classes),
            [classes[name] for name in names],
            self.records,
            self.repeated,
            self.columns,
        )

    def _nothing(self, kind: str) -> DataError:
        if not self.skipped:
            return DataError(f"{kind} has no rows.", hint="an image and a caption a row")
        why, places = next(iter(reasons(self.skipped).items()))
        hint = "other data, or mend this"
        if "image" in why or "folder" in why:
            hint = "--set data.pictures=FOLDER, where the images are"
        return DataError(
            f"None of the {self.records:,} rows of {kind} can be used. {places[0]}: {why}.",
            hint=hint,
        )

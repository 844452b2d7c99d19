"""Bring an index up to date: new and changed files are read in threads while the model works.

What the index said when the pass began, and what lies in the folder, are tables of SQLite's own temporary files: a
million images would take more memory than the model. The index changes while the pass goes on; these do not, so that a
chain of renamed files is followed as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lapclip.data.find_images import Scan, Stamp
from lapclip.errors import DataError
from lapclip.evaluation.hubness import hubness_of
from lapclip.machine.facts import logical_cores
from lapclip.progress import Progress, Status
from lapclip.searching.index import COLUMNS, Entry, Index, entry_of
from lapclip.searching.indexes import note_use
from lapclip.searching.read_images import Read, heic_is_unknown, in_batches, made_ahead, read_image
from lapclip.searching.search_model import SearchModel
from lapclip.suggest import command, install
from lapclip.text import counted

SAVED_EVERY = 1.0
"""Seconds of work that a killed process may lose."""
AHEAD = 3
"""Batches that are read ahead of the model."""
NO_HEIC = f"HEIC needs the package pillow-heif: {install('heic')}"
PAGE = 5000
"""Rows at once."""
COMPARED = 20_000
"""Vectors that are compared with the caption bank before the result is saved."""
TABLES = f"""
DROP TABLE IF EXISTS temp.walked;
DROP TABLE IF EXISTS temp.old;
CREATE TEMP TABLE walked (path BLOB PRIMARY KEY, bytes INTEGER, modified INTEGER) WITHOUT ROWID;
CREATE TEMP TABLE old AS SELECT {COLUMNS}, gone AS free FROM main.pictures;
CREATE UNIQUE INDEX temp.old_numbers ON old (number);
CREATE UNIQUE INDEX temp.old_paths ON old (path);
CREATE INDEX temp.old_digests ON old (digest);
"""
TO_READ = """
FROM walked LEFT JOIN old ON old.path = walked.path
WHERE (old.number IS NULL OR old.gone OR old.bytes != walked.bytes OR old.modified != walked.modified
       OR (old.row IS NULL AND old.reason IS NULL))
"""
"""Files that are new, changed, or have neither a vector nor a reason why not."""


@dataclass
class IndexUpdate:
    """What was done to an index, and what the user should know."""

    added: int = 0
    """Images that got a new vector."""
    moved: int = 0
    """Images whose file has another name, folder or time, and the same bytes as before."""
    removed: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Path in the folder, and why."""
    notes: list[str] = field(default_factory=list)


def update_index(
    index: Index,
    folder: Path,
    model: SearchModel,
    progress: Progress | None = None,
    waiting: Status | None = None,
) -> IndexUpdate:
    """Make the index say what is in the folder now. Where another process does so, and there is something to answer
    from, that is left to it."""
    found, identity = IndexUpdate(), model.identity
    if index.open():
        found.notes.append("The index was damaged, or of another version, and is made anew.")
    note_use(index.path, folder, model.which.reference)

    def wait_on() -> bool:
        if index.about("model") == identity and index.count():
            return False
        if waiting:
            waiting("waiting for another process that indexes this folder")
        return True

    with index.writing(wait_on) as mine:
        if mine:
            index.open()  # its files may have been removed while this process waited
            damaged = index.begin(identity, model.width)
            if damaged:
                found.notes.append(
                    f"Part of the index was damaged: {counted(damaged, 'image')} are indexed again."
                )
            _Indexer(index, folder, model, found).work(progress or (lambda done, total: None))
            fill_hubness(index, model, waiting)
        else:
            found.notes.append(
                "Another process is indexing this folder: this is what it has so far."
            )
    every = index.entries("reason IS NOT NULL AND NOT gone")
    found.unreadable += [(entry.path, entry.reason or "") for entry in every]
    return found


def fill_hubness(index: Index, model: SearchModel, waiting: Status | None = None) -> None:
    """Compute the hubness of all vectors that have none yet. No image is read for it."""
    calibration = model.calibration
    if calibration is None or (bank := calibration.digest) is None:
        return
    numbers, rows = index.without_hubness(bank)
    vectors = index.vectors()
    for first in range(0, len(rows), COMPARED):
        if waiting:
            waiting(f"comparing {len(rows):,} images with the caption bank")
        block = slice(first, first + COMPARED)
        index.save_hubness(numbers[block], hubness_of(vectors[rows[block]], calibration.bank))


class Known(NamedTuple):
    """What the index has for the bytes of a file."""

    entry: Entry
    free: bool
    """Whether its file is gone, so that its number can go to the one that has its bytes now."""


class Before:
    """What an index said when a pass over its folder began, beside what lies in the folder. Threads may share it."""

    def __init__(self, index: Index, images: Iterable[tuple[str, Stamp]]) -> None:
        self._index = index
        index.run_script(TABLES)
        rows = ((os.fsencode(path), *stamp) for path, stamp in images)
        self.files = 0
        """In the folder now."""
        while page := list(islice(rows, PAGE)):
            index.change_many("INSERT OR REPLACE INTO walked VALUES (?, ?, ?)", page)
            self.files += len(page)
        self.images: int = index.rows("SELECT count(*) FROM old")[0][0]
        """In the index before."""

    def count_to_read(self) -> int:
        return self._index.rows(f"SELECT count(*) {TO_READ}")[0][0]

    def to_read(self) -> Iterator[tuple[str, Stamp]]:
        """Files to read, in the order of their paths."""
        page = f"SELECT walked.path, walked.bytes, walked.modified {TO_READ} AND walked.path > ? ORDER BY 1 LIMIT {PAGE}"
        last = b""
        while rows := self._index.rows(page, (last,)):
            for path, *stamp in rows:
                yield os.fsdecode(path), Stamp(*stamp)
            last = rows[-1][0]

    def note_gone(self, hides: Callable[[str], bool]) -> list[int]:
        """Numbers of images whose files are no longer there; they may be in a folder that hides them."""
        missing = self._index.rows(
            "SELECT number, path FROM old WHERE path NOT IN (SELECT path FROM walked)"
        )
        gone = [number for number, path in missing if not hides(os.fsdecode(path))]
        self._index.change_many(
            "UPDATE old SET free = 1 WHERE number = ?", [(number,) for number in gone]
        )
        return gone

    def at(self, path: str) -> Entry | None:
        """What the index had at a path."""
        rows = self._index.rows(f"SELECT {COLUMNS} FROM old WHERE path = ?", (os.fsencode(path),))
        return entry_of(rows[0]) if rows else None

    def with_bytes(self, digest: str) -> Known | None:
        """An image of the same bytes that has a vector; best one whose file is gone, because it wants a new one."""
        rows = self._index.rows(
            f"SELECT {COLUMNS}, free FROM old WHERE digest = ? AND row IS NOT NULL ORDER BY free DESC, number LIMIT 1",
            (digest,),
        )
        return Known(entry_of(rows[0][:-1]), bool(rows[0][-1])) if rows else None

    def take(self, number: int) -> None:
        """An image whose file was gone has one again."""
        self._index.change_many("UPDATE old SET free = 0 WHERE number = ?", [(number,)])


class _Indexer:
    """One pass over a folder."""

    def __init__(self, index: Index, folder: Path, model: SearchModel, found: IndexUpdate) -> None:
        self.index, self.folder, self.model, self.found = index, folder, model, found
        self.waiting: list[tuple[Entry, np.ndarray | None]] = []
        """What is done and not saved: an image with its vector; None where its row is known."""
        self.saved = time.monotonic()

    def work(self, progress: Progress) -> None:
        scan = Scan(self.folder)
        self.before = Before(self.index, scan)
        self._check_not_empty(scan)
        self.index.mark_gone(self.before.note_gone(scan.hides))
        total = self.before.files
        self.passed = total - self.before.count_to_read()
        try:
            for batch in in_batches(self._read_ahead(), self.model.batch):
                self.passed += len(batch)
                self._take(batch)
                progress(self.passed, total)
            self._save()
        except KeyboardInterrupt:
            self._save()
            raise KeyboardInterrupt(
                f"Stopped. {self.index.count():,} of {total:,} images are indexed; the same command goes on."
            ) from None
        self.found.removed = self.index.forget_gone()
        if scan.closed:
            some = ", ".join(scan.closed[:3])
            self.found.notes.append(
                f"{len(scan.closed):,} folders could not be looked into: {some}."
            )

    def _check_not_empty(self, scan: Scan) -> None:
        if self.before.files or scan.closed:
            return
        if (
            self.before.images
        ):  # a disk that is not there looks like this, and its index took long to make
            forget = command("search", self.folder, "--forget")
            raise DataError(
                f"There is no image in {self.folder}, where {self.before.images:,} were before. Its index is kept.",
                hint=f"is its disk there? If they are gone for good, {forget}",
            )
        raise DataError(
            f"There is no image in {self.folder}.",
            hint="a folder with JPEG, PNG, WebP or HEIC files",
        )

    def _to_read(self) -> Iterator[tuple[str, Stamp]]:
        for path, stamp in self.before.to_read():
            if heic_is_unknown(path):
                self.found.unreadable.append((path, NO_HEIC))
                self.passed += 1
            else:
                yield path, stamp

    def _read_ahead(self) -> Iterator[tuple[str, Read]]:
        """Files in order, read in threads a few batches ahead."""
        view = self.model.view

        def has_vector(digest: str) -> bool:
            return self.before.with_bytes(digest) is not None

        def read(item: tuple[str, Stamp]) -> tuple[str, Read]:
            return item[0], read_image(self.folder / item[0], item[1], view, has_vector)

        return made_ahead(read, self._to_read(), AHEAD * self.model.batch, logical_cores())

    def _take(self, batch: Sequence[tuple[str, Read]]) -> None:
        """Vectors for what was read, and what there is to say of the rest."""
        squares = [read.square for _, read in batch if read.square is not None]
        vectors = iter(self.model.encode_pixels(np.stack(squares)) if squares else ())
        for path, read in batch:
            vector = next(vectors) if read.square is not None else None
            if read.missing:
                continue
            if read.passing:
                self.found.unreadable.append((path, read.passing))
                continue
            self.waiting.append(self._judged(path, read, vector))
        if time.monotonic() - self.saved > SAVED_EVERY:
            self._save()

    def _judged(
        self, path: str, read: Read, vector: np.ndarray | None
    ) -> tuple[Entry, np.ndarray | None]:
        before = self.before.at(path)
        entry = Entry(before.number if before else 0, path, *read.stamp, read.digest)
        entry = entry._replace(taken=read.taken, width=read.width, height=read.height)
        if read.reason:
            return entry._replace(reason=read.reason), None
        if vector is not None and not np.isfinite(vector).all():
            return entry._replace(reason="the model gives no numbers for it"), None
        if vector is not None:
            self.found.added += 1
            return entry, vector
        return self._known(entry, before)

    def _known(self, entry: Entry, before: Entry | None) -> tuple[Entry, np.ndarray | None]:
        """A file whose bytes have a vector: touched, renamed, or a copy of another."""
        old = self.before.with_bytes(entry.digest)
        assert old is not None, "what was there when the pass began stays there"
        entry = entry._replace(
            taken=old.entry.taken, width=old.entry.width, height=old.entry.height
        )
        self.found.moved += 1
        if before is not None and before.digest == entry.digest and before.row is not None:
            return entry._replace(row=before.row), None
        if old.free:
            self.before.take(old.entry.number)
            return entry._replace(number=old.entry.number, row=old.entry.row), None
        return entry, np.array(self.index.vectors()[old.entry.row])

    def _save(self) -> None:
        """Vectors first, then the images that name them."""
        fresh = [vector for _, vector in self.waiting if vector is not None]
        rows = iter(self.index.append(np.stack(fresh)) if fresh else ())
        entries = [
            entry if vector is None else entry._replace(row=next(rows))
            for entry, vector in self.waiting
        ]
        if entries:
            self.index.put(entries)
        self.waiting, self.saved = [], time.monotonic()


def check_folder(folder: Path) -> None:
    """Refuse what cannot be indexed before a model is loaded for it."""
    if not folder.is_dir():
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise DataError(f"{folder} {what}.", hint="lapclip search FOLDER, with a folder of images")

"""The index of one folder and one model, as plain files in the user's data directory.

pictures.db     SQLite: of each image its path, size, times, content hash, the row of its vector, and its hubness
                (`lapclip.evaluation.hubness`)
vectors-N.f16   the vectors one after another, float16 of unit length; pictures.db says which N is meant
model.txt       what leads to the model that made it (`lapclip.searching.indexes`)
folder.txt      the folder of images that it is of
lock            held by the process that writes

Rows are only ever appended, and they reach the disk before pictures.db names them, so whatever a killed process leaves
is true as far as it goes. The journal is SQLite's plain one: write-ahead logs need memory that processes share, which
network disks do not have.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np

from lapclip.errors import SearchError
from lapclip.paths import data_folder, digest_of_bytes, make_private

FORMAT = "3"
"""Rises when older files cannot be read any more; they are then made anew."""
PART_ROWS = 256
"""Rows of a file that share a checksum: about a quarter of a megabyte of vectors, which fits in a processor's cache.
All checksums of 100,000 vectors of 512 numbers take about 20 ms."""
SPARE_ROWS = 1000
"""Rows that no image uses any more, from which on the file is written anew, where they are half of it."""
COLUMNS = "number, path, bytes, modified, digest, taken, width, height, row, reason, gone"
DATABASE, VECTORS, LOCK = "pictures.db", "vectors-{}.f16", "lock"
SMALL = "small"
"""The folder of thumbnails, by the hash of the whole images."""
PATIENCE = 30.0
"""Seconds to wait for another process that is just writing."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pictures (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again, so that it stays the name of one picture
    path BLOB NOT NULL UNIQUE,                 -- inside the folder, as the file system has it
    bytes INTEGER NOT NULL,
    modified INTEGER NOT NULL,                 -- nanoseconds
    digest TEXT NOT NULL,
    taken REAL,                                -- seconds, as the camera says; NULL where it does not
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    row INTEGER,                               -- NULL where there is no vector (yet)
    reason TEXT,                               -- why it cannot be read; NULL where it can
    gone INTEGER NOT NULL DEFAULT 0,           -- no longer there, and perhaps found under another name
    hubness REAL                               -- by the caption bank that `about` names; NULL where it is not known
);
CREATE TABLE IF NOT EXISTS checksums (
    file TEXT NOT NULL,
    part INTEGER NOT NULL,
    rows INTEGER NOT NULL,                     -- of the part; only the last one of a file has fewer than others
    crc INTEGER NOT NULL,
    PRIMARY KEY (file, part)
);
CREATE INDEX IF NOT EXISTS digests ON pictures (digest);
"""


class Entry(NamedTuple):
    """What the index knows of an image."""

    number: int
    path: str
    """Inside the folder."""
    bytes: int
    modified: int
    """Nanoseconds."""
    digest: str = ""
    taken: float | None = None
    """Seconds, as the camera says."""
    width: int = 0
    height: int = 0
    row: int | None = None
    reason: str | None = None
    gone: bool = False


class Table(NamedTuple):
    """All images that can be found, in the order of their rows."""

    numbers: np.ndarray
    rows: np.ndarray
    times: np.ndarray
    """When each was taken, or else last changed, in seconds."""
    hubness: np.ndarray
    """Hubness of each image by the caption bank of the model. NaN where it is not known."""


def index_folder(folder: Path) -> Path:
    """Where the indexes of a folder lie."""
    real = os.path.normcase(os.path.realpath(folder))
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(real).name).strip("-")[:40] or "folder"
    return data_folder() / "search" / f"{name}-{digest_of_bytes(os.fsencode(real))[:16]}"


def thumbnail_path(index: Path, digest: str) -> Path:
    """Where the page caches the thumbnail of an image, in the folder of an index."""
    return index / SMALL / digest[:2] / f"{digest}.jpg"


class Index:
    """The files of an index. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database: sqlite3.Connection | None = None
        self._turn = threading.RLock()

    # -- opening, and who may write ----------------------------------------------------------------------------------

    def open(self) -> bool:
        """Open the files, making them where needed. True where damaged ones were thrown away."""
        self.close()
        try:
            for folder in (self.path.parent, self.path):  # small images and paths are nobody else's
                make_private(folder)
            try:
                self._connect()
                return False
            except sqlite3.OperationalError:
                raise
            except (sqlite3.DatabaseError, UnicodeDecodeError):  # not a database any more
                self.close()
                for path in self.path.glob(f"{DATABASE}*"):
                    path.unlink(missing_ok=True)
                self._connect()
                return True
        except (OSError, sqlite3.Error) as error:
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    @contextmanager
    def writing(self, waiting: Callable[[], bool]) -> Iterator[bool]:
        """Keep other writers out. While another one writes, `waiting` is asked each second whether to wait on; what is
        yielded says whether this process may write now."""
        lock = filelock.FileLock(self.path / LOCK)
        mine, patience = False, 0.0
        try:
            while not mine:
                try:
                    lock.acquire(timeout=patience)
                    mine = True
                except filelock.Timeout:
                    if not waiting():
                        break
                    patience = 1.0
        except (OSError, NotImplementedError) as error:
            raise _cannot_write(self.path, error) from error
        try:
            yield mine
        finally:
            if mine:
                lock.release()

    @property
    def is_removed(self) -> bool:
        """Whether it was forgotten since it was opened."""
        return not (self.path / DATABASE).exists()

    def version(self) -> tuple[int, ...]:
        """Another one after each change by another process, and where it was made anew."""
        try:
            status = os.stat(self.path / DATABASE)
        except OSError:
            return (0,)
        return status.st_dev, status.st_ino, self.rows("PRAGMA data_version")[0][0]

    # -- what it says ------------------------------------------------------------------------------------------------

    def about(self, name: str) -> str | None:
        found = self.rows("SELECT value FROM about WHERE name = ?", (name,))
        return found[0][0] if found else None

    def _number(self, name: str) -> int:
        try:
            return max(0, int(self.about(name) or 0))
        except (ValueError, TypeError) as error:
            raise _damaged(self.path, error) from error

    def entries(self, where: str = "1", values: Sequence[object] = ()) -> list[Entry]:
        """Images in the order of their numbers."""
        found = self.rows(f"SELECT {COLUMNS} FROM pictures WHERE {where} ORDER BY number", values)
        try:
            return [entry_of(row) for row in found]
        except TypeError as error:
            raise _damaged(self.path, error) from error

    def entry(self, number: int) -> Entry | None:
        """An image that can be found; None where there is none of this number."""
        found = self.entries("number = ? AND row IS NOT NULL AND NOT gone", (int(number),))
        return found[0] if found else None

    def count(self) -> int:
        """Images that can be found."""
        return self.rows("SELECT count(*) FROM pictures WHERE row IS NOT NULL AND NOT gone")[0][0]

    def snapshot(self, model: str, bank: str | None = None) -> tuple[Table, np.ndarray]:
        """Return all images that can be found, and the vectors of all rows, memory-mapped: as they are at one moment.

        Raise SearchError if another process has begun to index with another model.
        """
        with self._transaction("BEGIN"):  # a writer waits, so the file that is named can be mapped
            if self.about("model") != model:
                raise SearchError(
                    "Another process has begun to index this folder with another model.",
                    hint="the same command, once it is done",
                )
            table, vectors = self.table(), self.vectors()
            if bank is None or self.about("bank") != bank:
                table = table._replace(hubness=np.full_like(table.hubness, np.nan))
            return table, vectors

    def table(self) -> Table:
        """All images that can be found."""
        found = self.rows(
            "SELECT number, row, coalesce(taken, modified / 1e9), hubness FROM pictures "
            "WHERE row IS NOT NULL AND NOT gone ORDER BY row"
        )
        try:
            columns = np.array(found, dtype=np.float64).reshape(-1, 4)
        except (ValueError, TypeError) as error:
            raise _damaged(self.path, error) from error
        numbers, rows = columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64)
        return Table(numbers, rows, columns[:, 2], columns[:, 3].astype(np.float32))

    def vectors(self) -> np.ndarray:
        """All rows, memory-mapped: float16. Images say which of them count."""
        width = self._number("width")
        rows = self._rows_in_file(width)
        if not rows or not width:
            return np.zeros((0, width), np.float16)
        # Copied on writing, which nobody does: torch warns of memory that cannot be written to.
        return np.memmap(self._vectors, np.float16, "c", shape=(rows, width))

    # -- changing it -------------------------------------------------------------------------------------------------

    def begin(self, model: str, width: int) -> int:
        """Make it ready for vectors of a model. Return how many images lost theirs to damage."""
        with self._transaction() as database:
            before = dict(database.execute("SELECT name, value FROM about"))
            if before.get("model") == model and before.get("width") == str(width):
                return self._drop_damaged_parts(width)
            database.execute("UPDATE pictures SET row = NULL")
            number = self._number("vectors") + 1
            for name, value in (("model", model), ("width", str(width)), ("vectors", str(number))):
                database.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, value))
        self.sweep()
        return 0

    def append(self, vectors_NE: np.ndarray) -> list[int]:
        """Write vectors, to the disk, and return their rows. They count once images name them."""
        width = vectors_NE.shape[1]
        first = self._rows_in_file(width)
        self._write_rows(self._vectors, first, np.ascontiguousarray(vectors_NE, dtype=np.float16))
        return list(range(first, first + len(vectors_NE)))

    def without_hubness(self, bank: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and the rows of images whose hubness by this caption bank is not known.

        Forgets the hubness by another bank.
        """
        with self._transaction() as database:
            if self.about("bank") != bank:
                database.execute("UPDATE pictures SET hubness = NULL")
                database.execute("INSERT OR REPLACE INTO about VALUES ('bank', ?)", (bank,))
            table = self.table()
        is_unknown = np.isnan(table.hubness)
        return table.numbers[is_unknown], table.rows[is_unknown]

    def save_hubness(self, numbers: np.ndarray, hubness: np.ndarray) -> None:
        self.change_many(
            "UPDATE pictures SET hubness = ? WHERE number = ?",
            list(zip(hubness.tolist(), numbers.tolist(), strict=True)),
        )

    def _write_rows(self, path: Path, first: int, rows: np.ndarray) -> None:
        """Write rows to the disk, then their checksums. `first` is how many rows have one already."""
        try:
            with open(path, "r+b" if first else "wb") as file:
                file.seek(
                    first * rows.shape[1] * rows.itemsize
                )  # over part of a row, which a killed process may leave
                file.write(rows.tobytes())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        with self._transaction() as database:
            if not first:
                database.execute("DELETE FROM checksums WHERE file = ?", (path.name,))
            parts = dict(
                database.execute("SELECT part, crc FROM checksums WHERE file = ?", (path.name,))
            )
            end = first + len(rows)
            for part in range(first // PART_ROWS, -(-end // PART_ROWS)):
                begins, ends = max(first, part * PART_ROWS), min(end, (part + 1) * PART_ROWS)
                crc = zlib.crc32(rows[begins - first : ends - first].data, parts.get(part, 0))
                self._record_part(path, part, ends - part * PART_ROWS, crc)

    def _record_part(self, path: Path, part: int, rows: int, crc: int) -> None:
        self._execute(
            "INSERT OR REPLACE INTO checksums VALUES (?, ?, ?, ?)", (path.name, part, rows, crc)
        )

    def put(self, entries: Iterable[Entry]) -> None:
        """Add images, or what is new about them; number 0 is a new one. All of them or none."""
        with self._transaction() as database:
            for entry in entries:
                values = (os.fsencode(entry.path), *entry[2:10], int(entry.gone))
                # Another image may have had this path.
                database.execute(
                    "DELETE FROM pictures WHERE path = ? AND number != ?", (values[0], entry.number)
                )
                database.execute(
                    f"INSERT OR REPLACE INTO pictures ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (entry.number or None, *values),
                )

    def mark_gone(self, numbers: Iterable[int]) -> None:
        with self._transaction() as database:
            database.executemany(
                "UPDATE pictures SET gone = 1 WHERE number = ?", [(number,) for number in numbers]
            )

    def forget_gone(self) -> int:
        """Remove images that are no longer there; returns how many could be found before."""
        with self._transaction() as database:
            left = database.execute("SELECT digest, row FROM pictures WHERE gone").fetchall()
            database.execute("DELETE FROM pictures WHERE gone")
            still = "SELECT 1 FROM pictures WHERE digest = ?"
            unused = [
                digest
                for digest, _ in left
                if database.execute(still, (digest,)).fetchone() is None
            ]
        for digest in unused:
            with suppress(OSError):  # the page may be sending it
                thumbnail_path(self.path, digest).unlink(missing_ok=True)
        self._compact()
        return sum(row is not None for _, row in left)

    def sweep(self) -> None:
        """Remove files of vectors that are not used. Windows keeps those that another process reads: next time."""
        for path in self.path.glob(VECTORS.format("*")):
            if path != self._vectors:
                with suppress(OSError):
                    path.unlink()
        names = {path.name for path in self.path.glob(VECTORS.format("*"))}
        for (name,) in self.rows("SELECT DISTINCT file FROM checksums"):
            if name not in names:
                self._execute("DELETE FROM checksums WHERE file = ?", (name,))

    def _compact(self) -> None:
        """Write the vectors that are used into a new file, where most of them are not."""
        table, rows = self.table(), self._rows_in_file(self._number("width"))
        if rows - len(table.rows) < max(SPARE_ROWS, rows / 2):
            return
        old, number = self.vectors(), self._number("vectors") + 1
        for at in range(0, max(1, len(table.rows)), 65536):
            self._write_rows(
                self.path / VECTORS.format(number), at, old[table.rows[at : at + 65536]]
            )
        with self._transaction() as database:
            # Rows are in order, so none takes the place of one that is yet to move.
            moved = [(new, int(image)) for new, image in enumerate(table.numbers)]
            database.executemany("UPDATE pictures SET row = ? WHERE number = ?", moved)
            database.execute("UPDATE about SET value = ? WHERE name = 'vectors'", (str(number),))
        self.sweep()

    def _drop_damaged_parts(self, width: int) -> int:
        """Forget vectors that are not what was written, or are gone. Return how many images lost theirs."""
        lost = 0
        for part, rows, crc in self._damaged_parts(2 * width):
            first = part * PART_ROWS
            named = "row >= ? AND row < ?", (first, first + PART_ROWS)
            lost += self.rows(
                f"SELECT count(*) FROM pictures WHERE {named[0]} AND NOT gone", named[1]
            )[0][0]
            self._execute(f"UPDATE pictures SET row = NULL WHERE {named[0]}", named[1])
            # No image names these rows any more. What follows them keeps its place.
            if rows:
                self._record_part(self._vectors, part, rows, crc)
            else:
                self._execute(
                    "DELETE FROM checksums WHERE file = ? AND part = ?", (self._vectors.name, part)
                )
        # Rows without a checksum: the process that wrote them was killed, or the file is not ours.
        self._execute("UPDATE pictures SET row = NULL WHERE row >= ?", (self._rows_in_file(width),))
        return lost

    def _damaged_parts(self, row_bytes: int) -> list[tuple[int, int, int]]:
        """Return the damaged parts of the vectors, each with the rows and the checksum that it has now."""
        path = self._vectors
        recorded = self.rows(
            "SELECT part, rows, crc FROM checksums WHERE file = ? ORDER BY part", (path.name,)
        )
        damaged = []
        buffer = memoryview(bytearray(PART_ROWS * row_bytes))
        try:
            with open(path, "rb", buffering=0) if path.exists() else BytesIO() as file:
                for part, rows, crc in recorded:
                    file.seek(part * len(buffer))
                    there = min(rows, (file.readinto(buffer[: rows * row_bytes]) or 0) // row_bytes)
                    now = zlib.crc32(buffer[: there * row_bytes])
                    if (there, now) != (rows, crc):
                        damaged.append((part, there, now))
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        return damaged

    def _rows_in_file(self, width: int) -> int:
        """Return how many vectors are there and have a checksum."""
        path = self._vectors
        if not width or not path.exists():
            return 0
        recorded = self.rows(
            "SELECT coalesce(sum(rows), 0) FROM checksums WHERE file = ?", (path.name,)
        )[0][0]
        return min(recorded, path.stat().st_size // (2 * width))

    @property
    def _vectors(self) -> Path:
        return self.path / VECTORS.format(self.about("vectors") or 0)

    # -- SQLite ------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        database = sqlite3.connect(
            self.path / DATABASE, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        self._database = database
        database.executescript(SCHEMA)
        found = dict(database.execute("SELECT name, value FROM about"))
        if found.get("format", FORMAT) != FORMAT:
            raise sqlite3.DatabaseError("another format")
        if "format" not in found:
            database.execute("INSERT OR IGNORE INTO about VALUES ('format', ?)", (FORMAT,))

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._turn:
            assert self._database is not None, "open it first"
            try:
                self._database.execute(begin)
                try:
                    yield self._database
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
            except (OSError, sqlite3.Error) as error:
                raise _cannot_write(self.path, error) from error

    def _execute(self, statement: str, values: Sequence[object] = ()) -> None:
        with self._turn:
            assert self._database is not None, "open it first"
            self._database.execute(statement, values)

    def run_script(self, statements: str) -> None:
        """Make temporary tables, which other processes do not see."""
        with self._turn:
            assert self._database is not None, "open it first"
            try:
                self._database.executescript(statements)
            except sqlite3.Error as error:
                raise _cannot_write(self.path, error) from error

    def change_many(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        """The same change for each of some values, all of them or none."""
        with self._transaction("BEGIN") as database:
            database.executemany(statement, values)

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple]:
        """What a question in SQL gives."""
        with self._turn:
            assert self._database is not None, "open it first"
            try:
                return self._database.execute(statement, values).fetchall()
            except UnicodeDecodeError as error:
                raise _damaged(self.path, error) from error
            except sqlite3.Error as error:
                raise _cannot_write(self.path, error) from error


def entry_of(row: tuple) -> Entry:
    """A row with `COLUMNS`, as what it is."""
    number, path, *rest, gone = row
    return Entry._make((number, os.fsdecode(path), *rest, bool(gone)))


def _damaged(path: Path, error: BaseException) -> SearchError:
    return SearchError(
        f"The index in {path} is damaged: {error}.", hint=f"remove {path} and search again"
    )


def _cannot_write(path: Path, error: BaseException) -> SearchError:
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return _damaged(path, error)
    return SearchError(
        f"Cannot use the index in {path}: {getattr(error, 'strerror', None) or error}.",
        hint="LAPCLIP_DATA=FOLDER with a folder that can be written to and has room",
    )

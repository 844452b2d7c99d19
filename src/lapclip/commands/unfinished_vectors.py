"""Vectors that `lapclip embed` has computed so far. A killed process loses about a second of work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from lapclip.errors import DataError, RunBusy, first_line
from lapclip.paths import parse_json

ENDING, JOURNAL, LOCK = ".unfinished", "journal.jsonl", "lock"
KIND = np.dtype("<f4")


class UnfinishedVectors:
    """What is done of a file of vectors."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.folder = file.with_name(f"{file.name}{ENDING}")
        self._journal = self.folder / JOURNAL
        self._vectors = {name: self.folder / f"{name}.f32" for name in ("image", "text")}
        self._forget()

    def _forget(self) -> None:
        self.about: dict[str, Any] | None = None
        """What was begun; None where that is nothing."""
        self.rows = 0
        """Rows of the data that are done, with a vector or without."""
        self.counts = {"image": 0, "text": 0}
        """Vectors."""
        self.unreadable: list[tuple[int, str]] = []
        """Rows without a vector, and why."""
        self.passing = 0
        """How many of them may have one the next time: the fault was not the image's."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Read what is there, and keep other processes out until the end."""
        lock = filelock.FileLock(self.folder / LOCK)
        try:
            self.folder.mkdir(
                0o700, parents=True, exist_ok=True
            )  # it tells the names of what may be private photos
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RunBusy(
                f"Another process is writing {self._file}.", hint="wait for it, or another --out"
            ) from None
        except (OSError, NotImplementedError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise DataError(
                f"Cannot write to {self.folder}: {why}.", hint="--out in another folder"
            ) from error
        try:
            self._read()
            yield
        finally:
            nothing = not self._journal.exists()  # never begun, or finished
            if os.name == "nt":  # which removes no file that is open
                lock.release()
            if nothing:
                with suppress(OSError):
                    for path in (*self._vectors.values(), self.folder / LOCK):
                        path.unlink(missing_ok=True)
                    self.folder.rmdir()
            lock.release()

    def begin(self, about: dict[str, Any]) -> None:
        """Start anew."""
        self._journal.unlink(missing_ok=True)  # first: without it the vectors do not count
        self._forget()
        self.about = about
        for path in self._vectors.values():
            path.write_bytes(b"")
        self._add_line(about)

    def save(
        self,
        rows: int,
        image_ND: np.ndarray,
        text_MD: np.ndarray,
        unreadable: Sequence[tuple[int, str]],
        passing: int = 0,
    ) -> None:
        """Add vectors of images and of their captions, after which so many rows of the data are done."""
        for (name, path), vectors in zip(self._vectors.items(), (image_ND, text_MD), strict=True):
            if len(vectors):
                with open(path, "ab") as file:
                    file.write(np.ascontiguousarray(vectors, KIND).tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                self.counts[name] += len(vectors)
        self.rows = rows
        self.unreadable += unreadable
        self.passing += passing
        self._add_line(
            {"rows": rows, **self.counts, "unreadable": list(unreadable), "passing": passing}
        )

    def vectors(self, name: str) -> np.ndarray:
        """Map the vectors of all images or captions so far into memory."""
        assert self.about is not None
        shape = (self.counts[name], self.about["dimension"])
        if not shape[0]:  # an empty file cannot be mapped
            return np.zeros(shape, KIND)
        return np.memmap(self._vectors[name], KIND, "r", shape=shape)

    def done(self) -> None:
        """Nothing of it is needed any more."""
        self._journal.unlink()

    def _add_line(self, values: dict[str, Any]) -> None:
        with open(self._journal, "ab") as file:
            file.write(json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """Read the journal up to the first line that is damaged or lacks its vectors. Cut off the rest."""
        self._forget()
        with (
            suppress(FileNotFoundError, ValueError, KeyError, TypeError),
            open(self._journal, "rb") as file,
        ):
            about = parse_json(file.readline().decode())
            row_bytes = KIND.itemsize * int(about["dimension"])
            if row_bytes <= 0:
                raise ValueError("a damaged journal")
            room = {name: path.stat().st_size // row_bytes for name, path in self._vectors.items()}
            self.about, good = about, file.tell()
            with suppress(ValueError, KeyError, TypeError):
                for line in file:
                    said = parse_json(line.decode()) if line.endswith(b"\n") else {}
                    counts = {name: int(said[name]) for name in self.counts}
                    unreadable = [(int(row), str(why)) for row, why in said["unreadable"]]
                    if any(not 0 <= counts[name] <= room[name] for name in counts):
                        break
                    self.rows, self.counts = int(said["rows"]), counts
                    self.unreadable += unreadable
                    self.passing += int(said["passing"])
                    good += len(line)
            os.truncate(self._journal, good)
            for name, path in self._vectors.items():
                os.truncate(path, self.counts[name] * row_bytes)

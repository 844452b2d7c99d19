"""The indexes of one folder, one for each model that was used on it.

search/NAME-DIGEST/               everything about one folder that is searched
search/NAME-DIGEST/FINGERPRINT/   the index of the model with this fingerprint

Each has its own lock, so that processes with different models do not meet. Nothing here loads torch.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lapclip.errors import SearchError
from lapclip.paths import LARGEST_SETTINGS, read_bytes, write_atomic
from lapclip.runs.folder import RUNS
from lapclip.searching.index import (
    DATABASE,
    LOCK,
    PATIENCE,
    SMALL,
    VECTORS,
    Index,
    index_folder,
)
from lapclip.suggest import command
from lapclip.text import path_from_here
from lapclip.weights import is_model

MADE_BY = "model.txt"
"""What leads to the model that made an index, a path or a name on the hub; written at each use, so that its time says
when that was."""
IMAGES_OF = "folder.txt"
"""The folder of images that an index is of: its own name has only a digest of that."""


@dataclass(frozen=True)
class KnownIndex:
    """An index as it lies on the disk."""

    folder: Path
    """The images that it is of."""
    path: Path
    fingerprint: str | None
    """Of the image tower that made it; None where the index cannot be read."""
    reference: str | None
    """What leads to the model that made it. None if that was not written down."""
    used: float
    """When it was last used, in seconds."""

    @property
    def name(self) -> str:
        """The model as a person says it."""
        if self.reference is not None:
            return path_from_here(self.reference)
        return (
            f"a model with the fingerprint {self.fingerprint}"
            if self.fingerprint
            else f"{self.path}, unreadable"
        )

    @property
    def handle(self) -> str:
        """What names it after `--forget --model`."""
        return (
            path_from_here(self.reference) if self.reference else self.fingerprint or str(self.path)
        )

    def forget_command(self, handle: str | None = None) -> str:
        """What removes it."""
        return command(
            "search", path_from_here(self.folder), "--forget", "--model", handle or self.handle
        )

    @property
    def maker_is_gone(self) -> bool:
        """Whether the model that made it was written down, and is not there any more."""
        return self.reference is not None and not is_model(self.reference)

    @cached_property
    def images(self) -> int | None:
        """Images that can be found; None where the index cannot be read."""
        found = _ask(self.path, "SELECT count(*) FROM pictures WHERE row IS NOT NULL AND NOT gone")
        return found[0][0] if found else None

    @cached_property
    def bytes(self) -> int:
        """On the disk, small images included."""
        return sum(path.stat().st_size for path in _files(self.path))

    def to_dict(self) -> dict[str, Any]:
        """As --json prints it."""
        return {
            "path": str(self.path),
            "model": self.reference,
            "model_is_gone": self.maker_is_gone,
            "fingerprint": self.fingerprint,
            "images": self.images,
            "bytes": self.bytes,
            "used": self.used,
        }


def indexes_of(folder: Path) -> list[KnownIndex]:
    """The indexes of a folder, the one that was used last first."""
    found = [_known(folder, path.parent) for path in databases_in(index_folder(folder))]
    return sorted(found, key=lambda one: (-one.used, one.path))


def databases_in(root: Path) -> list[Path]:
    """Return the databases of the indexes of one folder, which lie here."""
    return [path for path in root.glob(f"*/{DATABASE}") if path.is_file()]


def what_is_indexed(root: Path) -> str:
    """The folder of images whose indexes lie here, and the models that made them, as far as it was written down."""
    found = [path.parent for path in databases_in(root)]
    folders = {path_from_here(folder) for path in found if (folder := _written(path / IMAGES_OF))}
    models = {path_from_here(model) for path in found if (model := _written(path / MADE_BY))}
    return ", ".join((*sorted(folders), *(f"with {model}" for model in sorted(models))))


def note_use(index: Path, folder: Path, reference: str) -> None:
    """Write down which model an index was just used with, and on which folder. Answers do not depend on it: a full disk
    is no error here."""
    with suppress(OSError):
        write_atomic(index / MADE_BY, os.fsencode(reference) + b"\n")
        write_atomic(index / IMAGES_OF, os.fsencode(os.path.abspath(folder)) + b"\n")


def _written(file: Path) -> str | None:
    """What was written down there; None where nothing was."""
    with suppress(OSError):
        return os.fsdecode(read_bytes(file, LARGEST_SETTINGS).removesuffix(b"\n")) or None
    return None


def named(known: Sequence[KnownIndex], name: str) -> list[KnownIndex]:
    """Return the indexes that a model made, by its path, its run's name, its name on the hub, or its fingerprint.

    The model itself may be gone.
    """
    names = {name, os.path.abspath(name), os.path.abspath(RUNS / name)}
    found = [one for one in known if names & {one.reference, one.fingerprint, str(one.path)}]
    if not found:
        raise SearchError(
            f"{name} made no index of this folder.", hint="--forget without --model lists them"
        )
    return found


def remove(one: KnownIndex) -> None:
    """Remove an index from the disk. One that is being made stays."""
    with Index(one.path).writing(lambda: False) as mine:
        if not mine:
            raise SearchError(
                f"Another process is indexing with {one.name}, so that its index stays.",
                hint="the same, once it is done",
            )
        try:
            for path in _files(one.path):
                path.unlink(missing_ok=True)
        except OSError as error:  # Windows keeps what another process reads
            raise SearchError(
                f"Cannot remove {one.path}: {error.strerror or error}.",
                hint="the same, once no other process uses it",
            ) from error
        shutil.rmtree(one.path / SMALL, ignore_errors=True)
        with suppress(
            OSError
        ):  # Windows removes it itself, when it is let go; who waits for it takes another
            (one.path / LOCK).unlink()
    for emptied in (one.path, one.path.parent):
        with suppress(OSError):  # other indexes lie there
            emptied.rmdir()


def _files(index: Path) -> list[Path]:
    """The files of an index; other indexes may lie in its folder."""
    notes = (index / MADE_BY, index / IMAGES_OF)
    own = (
        *index.glob(f"{DATABASE}*"),
        *index.glob(VECTORS.format("*")),
        *notes,
        *(index / SMALL).glob("*/*"),
    )
    return [path for path in own if path.is_file()]


def _known(folder: Path, path: Path) -> KnownIndex:
    about = dict(_ask(path, "SELECT name, value FROM about"))
    reference = _written(path / MADE_BY)
    used = path / (MADE_BY if reference else DATABASE)
    try:
        when = used.stat().st_mtime
    except OSError:  # removed just now
        when = 0.0
    return KnownIndex(folder, path, about.get("model"), reference, when)


def _ask(index: Path, question: str) -> list[tuple]:
    """What a question in SQL gives; nothing where the index cannot be read, about which opening it says more."""
    try:
        with closing(sqlite3.connect(index / DATABASE, timeout=PATIENCE)) as database:
            return database.execute(question).fetchall()
    except sqlite3.Error:
        return []

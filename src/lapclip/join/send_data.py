"""The data of a run as a few files: a description, and the pixels of each split as raw rows.

A host reads them out of its data when they are requested. A guest copies them into its cache, under
the digest of all of them, which the host has signed. An interrupted copy continues where it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from lapclip.config import Config
from lapclip.data.dataset import DataSet, Pairs, Pixels
from lapclip.data.loading import load_data
from lapclip.data.packed_store import room_left
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.errors import DataError, JoinError, RunError
from lapclip.join.agreement import Agreement
from lapclip.paths import (
    cache_folder,
    digest_of_file,
    digest_of_json,
    flush,
    make_private,
    parse_json,
    replace,
)
from lapclip.progress import DataProgress, Progress
from lapclip.text import size as size_text
from lapclip.text import to_json

CHUNK_BYTES = 4 * 2**20
SPARE_BYTES = 200_000_000  # left on the disk for what a run writes
DESCRIPTION = "description.json"
ARRAYS = {"aspects": np.float32, "identities": np.uint64, "labels": np.int64}  # of `Pairs`

FileDigest = tuple[int, str]
"""Size and SHA-256 of a file."""


class SentFile:
    """A file made of the rows of an array."""

    def __init__(self, rows: Pixels | np.ndarray) -> None:
        self._rows = rows
        self._row_bytes = int(np.prod(rows.shape[1:]))
        self.size = len(rows) * self._row_bytes

    def read(self, first: int, last: int) -> bytes:
        """Return the bytes from `first` up to `last`, at most a chunk."""
        if not 0 <= first < last <= min(self.size, first + CHUNK_BYTES):
            raise ValueError("there are no such bytes")
        first_row, last_row = first // self._row_bytes, -(-last // self._row_bytes)
        content = np.ascontiguousarray(self._rows[first_row:last_row]).tobytes()
        offset = first_row * self._row_bytes
        return content[first - offset : last - offset]

    def digest(self) -> FileDigest:
        digest = hashlib.sha256()
        for first in range(0, self.size, CHUNK_BYTES):
            digest.update(self.read(first, min(self.size, first + CHUNK_BYTES)))
        return self.size, digest.hexdigest()


def files_of(data: DataSet) -> list[SentFile]:
    """Return the files of a data set: its description, then the pixels of each split."""
    pixels = [SentFile(pairs.pixels) for pairs in data.splits.values()]
    return [SentFile(np.frombuffer(_describe(data).encode(), np.uint8)), *pixels]


def _describe(data: DataSet) -> str:
    splits = []
    for name, pairs in data.splits.items():
        split: dict[str, Any] = {array: getattr(pairs, array) for array in ARRAYS}
        split["name"], split["shape"] = name, pairs.pixels.shape
        split["captions"] = [list(captions) for captions in pairs.captions]
        split["names"] = list(pairs.names)
        splits.append(split)
    description = {
        "fingerprint": data.fingerprint,
        "alphabet": data.alphabet,
        "notes": list(data.notes),
        "classes": list(data.classes),
        "how_split": data.how_split,
    }
    return to_json({"data": description, "splits": splits})


def digest_of_bundle(files: Sequence[FileDigest]) -> str:
    """Return one digest of all files. Empty without files."""
    return digest_of_json(files) if files else ""


def bundle_folder(bundle: str) -> Path:
    """Return where the cache has the files with this digest, whichever host they are from."""
    return cache_folder() / f"bundle-{bundle[:24]}"


def _file_name(number: int) -> str:
    """Return the name of a file in its folder. Names never come from a host."""
    return f"{number}.pixels" if number else DESCRIPTION


def copy_bundle(
    files: Sequence[FileDigest], read: Callable[[int, int, int], bytes], progress: Progress
) -> None:
    """Copy files into the cache. Their folder appears when they are whole.

    `read` returns a range of a file by its number.
    """
    folder = bundle_folder(digest_of_bundle(files))
    incoming = folder.with_name(f"{folder.name}.incoming")
    make_private(folder.parent)
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
            return
        make_private(incoming)
        done = sum(path.stat().st_size for path in incoming.iterdir())
        total, free = sum(size for size, _ in files), room_left(folder)
        if total - done + SPARE_BYTES > free:
            raise JoinError(
                f"The data takes {size_text(total)}, and the disk of {folder.parent} has "
                f"{size_text(free)} left.",
                hint="lapclip clean, or LAPCLIP_CACHE on another disk",
            )
        for number, (size, digest) in enumerate(files):
            path = incoming / _file_name(number)
            with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as target:
                first = target.seek(0, os.SEEK_END)
                while first < size:
                    content = read(number, first, min(size, first + CHUNK_BYTES))
                    target.write(content)
                    first += len(content)
                    done += len(content)
                    progress(done, total)
            flush(path)
            if digest_of_file(path) != digest:
                path.unlink()
                raise JoinError(
                    f"{path.name} does not have the digest that the host signed.",
                    hint="lapclip join again",
                )
        replace(incoming, folder)


def read_bundle(bundle: str) -> DataSet:
    """Return the data that was copied."""
    folder = bundle_folder(bundle)
    try:
        description = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
        splits = {}
        for number, split in enumerate(description["splits"], start=1):
            splits[split["name"]] = _read_pairs(folder / _file_name(number), split)
        return DataSet(splits, **description["data"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"The copied data in {folder} cannot be read: {error}.", hint="lapclip join again"
        ) from None


def _read_pairs(path: Path, split: dict[str, Any]) -> Pairs:
    pixels = np.memmap(path, np.uint8, "r", shape=tuple(split["shape"]))
    arrays: dict[str, Any] = {}
    for name, dtype in ARRAYS.items():
        values = split[name]
        arrays[name] = None if values is None else np.array(values, dtype)
    captions = [tuple(captions) for captions in split["captions"]]
    if len(captions) != len(pixels):
        raise ValueError(f"{path.name} has not as many images as there are captions")
    return Pairs(pixels, captions, split["names"] or (), **arrays)


def load_again(config: Config, fingerprint: str, progress: DataProgress | None) -> DataSet:
    """Load the data of a run that continues here.

    A guest opens no path that its host names: it has a copy, or draws the images itself.
    """
    agreement = Agreement.of_this_process()
    if agreement:
        agreement.check(config, fingerprint)
        if agreement.bundle:
            return read_bundle(agreement.bundle)
        if not find_source(config.data.source).is_drawn:
            raise RunError("A guest opens no path that its host names.", hint="lapclip join again")
    return load_data(config.data, View.of(config.model), progress)

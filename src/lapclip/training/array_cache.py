"""Arrays that take minutes to compute, cached on disk: written whole or not at all, memory-mapped, swept when old."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from lapclip.data.packed_store import UNUSED, room_left
from lapclip.errors import DataError
from lapclip.paths import cache_folder, write_atomic

ROOM = 0.5
"""Share of the free disk that an array may take."""


def array_path(*about: object) -> Path:
    """The file of an array that depends on all that is given."""
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:24]
    return cache_folder() / f"features-{key}.npy"


def has_room(path: Path, needed: int) -> bool:
    """Whether the disk has room for so many bytes."""
    return path.exists() or needed <= ROOM * room_left(path.parent)


def read_array(path: Path) -> np.ndarray | None:
    """The array, memory-mapped, or None where it has to be made."""
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # of a cache that can only be read
        os.utime(path)  # its date is that of the last use
    return found


def write_array(path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Write rows as they come, then give the file its name, and read it."""

    def write(partial: Path) -> None:
        # In sequence, not through a memory map: there a full disk would be a signal instead of an error.
        with open(partial, "wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for rows in blocks:
                file.write(np.ascontiguousarray(rows, dtype=dtype).tobytes())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        write_atomic(path, write)
    except OSError as error:
        # Windows replaces no file that is mapped: another process was first with the same array, and works with it.
        found = read_array(path)
        if found is not None and found.shape == shape and found.dtype == dtype:
            return found
        raise DataError(
            f"Cannot write features to {path}: {error.strerror or error}.",
            hint="LAPCLIP_CACHE=FOLDER with a folder that has room, or --set train.features=never",
        ) from error
    found = read_array(path)
    assert found is not None
    return found


def _sweep(folder: Path) -> None:
    """Remove what nobody used for a month, and what killed processes left half-written."""
    for path in (*folder.glob("features-*.npy"), *folder.glob(".features-*.partial")):
        with suppress(OSError):
            age = time.time() - path.stat().st_mtime
            if age > (86_400 if path.suffix == ".partial" else UNUSED):
                path.unlink()

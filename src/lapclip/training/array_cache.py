"""Cache of large arrays: one memory-mapped `.npy` file for each, named by a hash of what it depends
on."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from lapclip.data.packed_store import room_left
from lapclip.errors import DataError
from lapclip.join.agreement import name_here
from lapclip.machine.desktop import ends_in_order
from lapclip.paths import cache_folder, sweep, write_atomic

MAX_DISK_SHARE = 0.5  # of the free disk, for one array
UNUSED_SECONDS = 30 * 86_400


def array_path(*key: object) -> Path:
    """Return the file of the array that depends on all values of the key."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    return cache_folder() / name_here(f"features-{digest}.npy")


def has_room(path: Path, size: int) -> bool:
    """Return whether the disk has room for an array of so many bytes, or has the array already."""
    return path.exists() or size <= MAX_DISK_SHARE * room_left(path.parent)


def read_array(path: Path) -> np.ndarray | None:
    """Return a cached array, memory-mapped. None if it is missing or damaged."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # the cache may be read-only
        os.utime(path)  # marks the last use
    return array


def write_array(
    path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Write an array from consecutive blocks of rows, and return it memory-mapped."""

    def write(partial: Path) -> None:
        # Only the owner may read the file, because it can describe private photos.
        # Written in sequence: on a full disk, writing to a memory map raises a signal, not an
        # error.
        with open(partial, "wb", opener=_open_private) as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype=dtype).tobytes())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_unused(path.parent)
        with ends_in_order():
            write_atomic(path, write)
    except OSError as error:
        # Windows cannot replace a mapped file: another process wrote the same array first and uses
        # it.
        other = read_array(path)
        if other is not None and other.shape == shape and other.dtype == dtype:
            return other
        raise DataError(
            f"Cannot write features to {path}: {error.strerror or error}.",
            hint="LAPCLIP_CACHE=FOLDER with a folder that has room, or --set train.features=never",
        ) from error
    array = read_array(path)
    assert array is not None
    return array


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove_unused(folder: Path) -> None:
    """Remove arrays that were not used for a month, and unfinished files of killed processes."""
    sweep(folder)
    for path in folder.glob("features-*.npy"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink()

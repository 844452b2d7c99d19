"""The packed store: images decoded once, by all cores, into one memory-mapped file that training reads.

A store goes on where a killed process left it. An image is packed again when its bytes change, not when its file is
only touched; a broken one is remembered until it changes, unless the fault may pass; images with the same bytes share
a row.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from lapclip.data import decode as decoding
from lapclip.data import pixels
from lapclip.data.dataset import Pixels
from lapclip.data.decode import MayPass, decode, look
from lapclip.data.packed_index import NOT_KEPT, Catalogue, Entry, digest_of
from lapclip.data.pixels import View, as_view, fit_image, squeeze_image
from lapclip.data.table import Skipped, StoredImage
from lapclip.errors import DataError, first_line
from lapclip.machine.facts import logical_cores
from lapclip.paths import cache_folder
from lapclip.progress import DataProgress

MIDDLE, WHOLE = "middle", "whole"
"""How an image becomes a square: its middle cut out, exactly as `encode_image` does it, or all of it squeezed."""
SOURCE = "source"
"""The file of a store that says whose images it has."""
UNUSED = 30 * 86_400
"""Seconds after which a store that nobody used may go."""
SAVED_EVERY = 2.0
"""Seconds of work that a killed process loses."""
AHEAD = 64
"""Squares a thread may be ahead of what is written, so that all go on while the disk is waited for."""
SPARE_ROWS = 1000
"""Rows that no image uses any more, from which on a store may be rebuilt, where they are most of it."""


@dataclass(frozen=True)
class Packed:
    """Images that can be used, in the order they were given, and those that cannot."""

    stored: np.ndarray
    """All rows of the store, memory-mapped; none where the images were looked at and not kept."""
    kept: Sequence[int]
    """Which of the given images can be used."""
    entries: Sequence[Entry]
    """What is known of each of these."""
    skipped: Sequence[Skipped]

    def pixels(self, entries: Iterable[Entry] | None = None) -> Pixels:
        """The squares of some of the images, or of all of them. Neighbours in the store are not copied."""
        chosen = self.entries if entries is None else entries
        rows = np.array([entry.row for entry in chosen], dtype=np.int64)
        if not len(rows) or np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return self.stored[rows[0] : rows[0] + len(rows)] if len(rows) else self.stored[:0]
        return PackedRows(self.stored, rows)


class PackedRows:
    """Rows of a packed store in an order of their own."""

    def __init__(self, stored: np.ndarray, rows: np.ndarray) -> None:
        self._stored, self._rows = stored, rows
        self.shape = (len(rows), *stored.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        return self._stored[self._rows[rows]]


def store_folder(source: str, view: View | int, fit: str) -> Path:
    """Where the images of a source are kept. Changes with everything that decides what their pixels are."""
    digest = hashlib.sha256(
        f"{source} {as_view(view).key} {fit} {PIL.__version__} {torch.__version__}".encode("utf-8", "surrogatepass")
    )
    for module in (decoding, pixels):
        digest.update(Path(module.__file__ or "").read_bytes().replace(b"\r\n", b"\n"))
    return cache_folder() / f"packed-{digest.hexdigest()[:16]}"


def use_store(source: str, view: View | int, fit: str) -> Path:
    """The folder of a store that is about to be used. Others of the same source, which have another size or come from
    another version, are removed once they have not been used for a month."""
    folder, name = store_folder(source, view, fit), source.encode("utf-8", "surrogatepass")
    with suppress(OSError):  # where nothing can be written, packing says so
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SOURCE).write_bytes(name)  # its date is that of the last use
        for other in folder.parent.glob(f"packed-*/{SOURCE}"):
            unused = time.time() - other.stat().st_mtime
            if unused > UNUSED and other.parent != folder and other.read_bytes() == name:
                shutil.rmtree(other.parent, ignore_errors=True)
    return folder


def room_needed(folder: Path, count: int, side: int) -> int:
    """Bytes that packing so many images still takes, with what is there already."""
    there = sum(path.stat().st_size for path in folder.glob("pixels-*.bin"))
    return max(0, count * side * side * 3 - there)


def room_left(folder: Path) -> int:
    """Bytes that the disk of a folder has left."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def prepare(data: bytes, view: View | int, fit: str) -> tuple[np.ndarray, decoding.Decoded]:
    """The square of an image, from the bytes of its file."""
    header, view = look(data), as_view(view)
    with header.turn():
        if fit == MIDDLE:  # never at a fraction of its size: scores are those of the very images
            decoded = decode(header, put_off=True)
            return view.finish(decoded, fit_image(decoded.image, view)), decoded
        decoded = decode(header, view.side, put_off=True)
        return view.finish(decoded, squeeze_image(decoded.image, view.side)), decoded


def pack(
    images: Sequence[StoredImage],
    folder: Path,
    view: View | int,
    fit: str,
    progress: DataProgress | None = None,
    *,
    keep: bool = True,
    threads: int | None = None,
) -> Packed:
    """Images as squares in a store, made where they are not there yet. With `keep` off they are only looked at:
    each is decoded once to know that it can be, and its pixels are dropped."""
    tell = progress or (lambda done, total, what="", /: None)
    side = as_view(view).side
    catalogue = Catalogue(folder, side * side * 3)
    doing = "packing" if keep else "looking at"
    can_stream = keep and fit == WHOLE  # held-out images are always packed
    try:
        with catalogue.lock(lambda: tell(0, len(images), "waiting for another process that packs")):
            catalogue.open()
            stamps, skipped = _stamps(images, tell)
            missing = [at for at, stamp in stamps.items() if not _known(catalogue, images[at].name, stamp, keep)]
            if keep:
                _check_room(folder, len(missing) * catalogue.row_bytes, can_stream)
            if missing:
                work = [(images[at], stamps[at]) for at in missing]
                told = lambda done: tell(len(images) - len(missing) + done, len(images), doing)  # noqa: E731
                skipped += _Packer(catalogue, view, fit, keep).work(work, threads or logical_cores(), told)
            return _result(catalogue, images, stamps, skipped, side, keep)
    except OSError as error:
        raise _cannot_write(folder, len(images) * catalogue.row_bytes if keep else 0, error, can_stream) from error


class _Packer:
    """Decodes in threads and writes in order, so that the store is the same however many threads there are."""

    def __init__(self, catalogue: Catalogue, view: View | int, fit: str, keep: bool) -> None:
        self.catalogue, self.view, self.fit, self.keep = catalogue, view, fit, keep
        usable = (entry for entry in catalogue.entries.values() if not entry.broken)
        self.by_digest = {entry.digest: entry for entry in usable if entry.row != NOT_KEPT or not keep}
        self.rows = catalogue.rows
        self.waiting: list[Entry] = []

    def work(self, images: list[tuple[StoredImage, str]], threads: int, told: Callable[[int], None]) -> list[Skipped]:
        """Pack images with their stamps; returns those that could not be read at all."""
        skipped: list[Skipped] = []
        self.catalogue.pixels.touch()
        file = open(self.catalogue.pixels, "r+b")  # noqa: SIM115 (closing must not hide why writing failed)
        try:
            file.seek(self.rows * self.catalogue.row_bytes)  # over what a killed process wrote and did not list
            saved = time.monotonic()
            for done, made in enumerate(_in_order(self._prepared, images, threads), start=1):
                if isinstance(made, Skipped):
                    skipped.append(made)
                else:
                    self._add(file, *made)
                if time.monotonic() - saved > SAVED_EVERY:
                    self._save(file)
                    saved = time.monotonic()
                told(done)
        except OSError:
            raise
        except BaseException:  # Ctrl-C, too: what is done is done
            with suppress(OSError):
                self._save(file)
            raise
        else:
            self._save(file)
        finally:
            with suppress(OSError):
                file.close()
        return skipped

    def _prepared(self, picture: StoredImage, stamp: str) -> tuple[Entry, np.ndarray | None] | Skipped:
        """In a thread: read, and decode unless the same bytes are there already."""
        try:
            data = picture.read()
        except (OSError, ValueError) as error:
            return Skipped(picture.name, f"it cannot be read ({first_line(error)})")
        digest = digest_of(data)
        if digest in self.by_digest:
            return Entry(picture.name, stamp, digest), None
        try:
            square, decoded = prepare(data, self.view, self.fit)
        except MayPass as error:
            return Skipped(picture.name, error.message)
        except DataError as error:
            return Entry(picture.name, stamp, digest, broken=error.message), None
        entry = Entry(
            picture.name, stamp, digest, NOT_KEPT, decoded.width, decoded.height, tuple(sorted(decoded.marks))
        )
        return entry, square if self.keep else None

    def _add(self, file: Any, entry: Entry, square: np.ndarray | None) -> None:
        if not entry.broken:
            if twin := self.by_digest.get(entry.digest):
                entry = replace(twin, name=entry.name, stamp=entry.stamp)
            elif square is not None:
                file.write(np.ascontiguousarray(square))
                entry = replace(entry, row=self.rows)
                self.rows += 1
            self.by_digest.setdefault(entry.digest, entry)
        self.waiting.append(entry)

    def _save(self, file: Any) -> None:
        """Pixels first, then the lines that name them."""
        file.flush()
        os.fsync(file.fileno())
        self.catalogue.append(self.waiting)
        self.waiting = []


def _in_order(
    make: Callable[[StoredImage, str], Any], images: Iterable[tuple[StoredImage, str]], threads: int
) -> Iterator[Any]:
    """What threads make of each image, in the order of the images, a few ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="lapclip-packing")
    try:
        waiting: deque[Future] = deque()
        for picture, stamp in images:
            waiting.append(pool.submit(make, picture, stamp))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _stamps(images: Sequence[StoredImage], tell: DataProgress) -> tuple[dict[int, str], list[Skipped]]:
    """The stamps of the images that are there, by their place, and the others."""
    stamps: dict[int, str] = {}
    skipped: list[Skipped] = []
    began = time.monotonic()
    for at, picture in enumerate(images):
        try:
            stamps[at] = picture.stamp()
        except FileNotFoundError:
            skipped.append(Skipped(picture.name, "there is no such file"))
        except (OSError, ValueError) as error:
            skipped.append(Skipped(picture.name, f"it cannot be read ({first_line(error)})"))
        if at % 1000 == 999 and time.monotonic() - began > 1:
            tell(at + 1, len(images), "looking for")
    return stamps, skipped


def _known(catalogue: Catalogue, name: str, stamp: str, keep: bool) -> bool:
    entry = catalogue.entries.get(name)
    if entry is None or entry.stamp != stamp:
        return False
    return bool(entry.broken) or not keep or entry.row != NOT_KEPT


def _result(
    catalogue: Catalogue,
    images: Sequence[StoredImage],
    stamps: dict[int, str],
    skipped: list[Skipped],
    side: int,
    keep: bool,
) -> Packed:
    kept, broken = [], []
    for at, stamp in stamps.items():
        name = images[at].name
        if _known(catalogue, name, stamp, keep):  # else it could not be read now
            (broken if catalogue.entries[name].broken else kept).append(at)
    skipped = [*skipped, *(Skipped(images[at].name, catalogue.entries[images[at].name].broken) for at in broken)]
    if keep:
        _rebuild_if_sparse(catalogue)
    entries = [catalogue.entries[images[at].name] for at in kept]
    return Packed(_stored(catalogue, side, keep), kept, entries, skipped)


def _stored(catalogue: Catalogue, side: int, keep: bool) -> np.ndarray:
    if not keep or not catalogue.rows:  # an empty file cannot be mapped
        return np.zeros((0, side, side, 3), np.uint8)
    return np.memmap(catalogue.pixels, np.uint8, "r", shape=(catalogue.rows, side, side, 3))


def _rebuild_if_sparse(catalogue: Catalogue) -> None:
    """Copy what is in use to a file of its own, where that is less than a quarter of the store. Images that are not
    asked for now are in use as well: they may be those of another split."""
    entries = list(catalogue.entries.values())
    rows = sorted({entry.row for entry in entries} - {NOT_KEPT})
    dead = catalogue.rows - len(rows)
    if dead < SPARE_ROWS or dead < 3 * len(rows):
        return
    places = {row: place for place, row in enumerate(rows)}
    target = catalogue.next_pixels()
    try:
        with open(catalogue.pixels, "rb") as old, open(target, "wb") as new:
            for row in rows:
                old.seek(row * catalogue.row_bytes)
                new.write(old.read(catalogue.row_bytes))
            new.flush()
            os.fsync(new.fileno())
    except OSError:  # no room for both: the sparse one serves as well
        with suppress(OSError):
            target.unlink()
        return
    catalogue.replace(target, [replace(entry, row=places.get(entry.row, NOT_KEPT)) for entry in entries])


def _check_room(folder: Path, needed: int, can_stream: bool) -> None:
    free = room_left(folder)
    if needed > free:
        raise _too_small(folder, needed, free, can_stream)


def _too_small(folder: Path, needed: int, free: int, can_stream: bool) -> DataError:
    return DataError(
        f"The disk of {folder} has too little room: packed, the images take {needed / 1e9:,.2f} GB more, and "
        f"{free / 1e9:,.2f} GB are free.",
        hint="LAPCLIP_CACHE=FOLDER with a folder on a larger disk"
        + (", or --set data.stream=always" if can_stream else ""),
    )


def _cannot_write(folder: Path, needed: int, error: OSError, can_stream: bool) -> DataError:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        there = sum(path.stat().st_size for path in folder.glob("pixels-*.bin"))
        return _too_small(folder, max(0, needed - there), 0, can_stream)
    return DataError(
        f"Cannot write images to {folder}: {error.strerror or error}.",
        hint="LAPCLIP_CACHE=FOLDER with a folder that can be written to and has room",
    )

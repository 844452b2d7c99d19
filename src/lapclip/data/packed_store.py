"""The packed store: images decoded once, by all cores, into one memory-mapped file that training reads.

A store goes on where a killed process left it. An image is packed again when its bytes change, not when its file is
only touched; a broken one is remembered until it changes, unless the fault may pass; images with the same bytes share
a row.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from lapclip.data.copies import SIGNATURE_SIDE, SIGNATURE_VERSION, content_of, signature_of
from lapclip.data.dataset import Pixels, select_pixels
from lapclip.data.decode import (
    DECODING_VERSION,
    NO_MEMORY,
    Decoded,
    TemporaryFault,
    decode,
    decoding_threads,
)
from lapclip.data.packed_index import NOT_STORED, PIXELS, Entry, PackedIndex, digest_of
from lapclip.data.pixels import (
    RESIZING_VERSION,
    View,
    as_view,
    fit_image,
    squeeze_image,
    whole_side,
)
from lapclip.data.table import Skipped, StoredImage
from lapclip.errors import DataError, first_line
from lapclip.machine.facts import logical_cores
from lapclip.paths import cache_folder, digest_of_bytes, make_private, sweep
from lapclip.progress import DataProgress, ignore_progress

MIDDLE, WHOLE = "middle", "whole"
"""How an image becomes a square: its middle cut out, exactly as `encode_image` does it, or all of it squeezed."""
SIGNATURE = f"signature {SIGNATURE_VERSION}"
"""No square is made: an image is inspected in small, to know whether it can be read and what its copies are."""
SOURCE = "source"
"""The file of a store that says whose images it has."""
SAVED_EVERY = 2.0
"""Seconds of work that a killed process loses."""
MAX_PENDING = 64 * logical_cores()
"""Images that may be decoded ahead of what is written, so that threads go on while the disk is waited for."""


@dataclass(frozen=True)
class Packed:
    """Images that can be used, in the order they were given, and those that cannot."""

    stored: np.ndarray
    """All rows of the store, memory-mapped; none where the images were decoded and not stored."""
    usable: Sequence[int]
    """Which of the given images can be used, as indices."""
    entries: Sequence[Entry]
    """What is known of each of these."""
    skipped: Sequence[Skipped]

    def pixels(self, entries: Iterable[Entry] | None = None) -> Pixels:
        """The squares of some of the images, or of all of them. Neighbours in the store are not copied."""
        return select_pixels(
            self.stored, [entry.row for entry in (self.entries if entries is None else entries)]
        )


def store_folder(source: str, view: View | int, fit: str) -> Path:
    """Where the images of a source are cached. Changes with everything that decides what their pixels are."""
    versions = f"{DECODING_VERSION} {RESIZING_VERSION} {PIL.__version__} {torch.__version__}"
    key = f"{source} {as_view(view).key} {fit} {versions}".encode("utf-8", "surrogatepass")
    return cache_folder() / f"packed-{digest_of_bytes(key)[:16]}"


def use_store(source: str, view: View | int, fit: str) -> Path:
    """Return the folder of a store that is about to be used. It notes its source, for `lapclip clean`."""
    folder = store_folder(source, view, fit)
    with suppress(OSError):  # where nothing can be written, packing says so
        make_private(folder)  # private photos are nobody else's
        sweep(folder.parent)
        (folder / SOURCE).write_bytes(source.encode("utf-8", "surrogatepass"))
    return folder


def room_needed(folder: Path, count: int, side: int) -> int:
    """Bytes that packing so many images still takes, with what is there already."""
    return max(0, count * side * side * 3 - _stored_bytes(folder))


def _stored_bytes(folder: Path) -> int:
    """Return the bytes of the squares in a store."""
    with suppress(FileNotFoundError):
        return (folder / PIXELS).stat().st_size
    return 0


def store_bytes(training: int, held_out: int, side: int) -> int:
    """Bytes of a packed store, a byte a colour of each pixel. Training images are stored larger than they are seen."""
    return 3 * (training * whole_side(side) ** 2 + held_out * side**2)


def room_left(folder: Path) -> int:
    """Bytes that the disk of a folder has left."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def prepare(data: bytes, view: View | int, fit: str) -> tuple[np.ndarray, Decoded]:
    """Decode an image file and return the square of it that a store holds, with the decoded image."""
    view = as_view(view)
    if fit == MIDDLE:  # at full size, so that scores are those of the very image
        decoded = decode(data, defer_profile=True)
        square = fit_image(decoded.image, view)
    else:
        decoded = decode(data, view.side, defer_profile=True)
        square = squeeze_image(decoded.image, view.side)
    return view.finish(decoded, square), decoded


def pack(
    images: Sequence[StoredImage],
    folder: Path,
    view: View | int,
    fit: str,
    progress: DataProgress | None = None,
    *,
    store: bool = True,
) -> Packed:
    """Images as squares in a store, made where they are not there yet. With `store` off they are only checked:
    each is decoded once to know that it can be, and its pixels are dropped."""
    report = progress or ignore_progress
    side = as_view(view).side
    index = PackedIndex(folder, side * side * 3)
    doing = "packing" if store else "checking"
    can_stream = store and fit == WHOLE  # held-out images are always packed
    try:
        with index.lock(lambda: report(0, len(images), "waiting for another process that packs")):
            index.open()
            stamps, skipped = _stamps(images, report)
            missing = [
                at
                for at, stamp in stamps.items()
                if not _known(index, images[at].name, stamp, store)
            ]
            if store:
                _check_room(folder, len(missing) * index.row_bytes, can_stream)
            if missing:
                work = [(images[at], stamps[at]) for at in missing]
                count = lambda done: report(len(images) - len(missing) + done, len(images), doing)  # noqa: E731
                skipped += _Packer(index, view, fit, store).work(work, count)
            return _result(index, images, stamps, skipped, side, store)
    except OSError as error:
        raise _cannot_write(
            folder, len(images) * index.row_bytes if store else 0, error, can_stream
        ) from error


class _Packer:
    """Decodes in threads and writes in order, so that the store is the same however many threads there are."""

    def __init__(self, index: PackedIndex, view: View | int, fit: str, store: bool) -> None:
        self.index, self.view, self.fit, self.store = index, view, fit, store
        usable = (entry for entry in index.entries.values() if not entry.broken)
        self.by_digest = {
            entry.digest: entry for entry in usable if entry.row != NOT_STORED or not store
        }
        self.rows = index.rows
        self.waiting: list[Entry] = []

    def work(
        self, images: list[tuple[StoredImage, str]], count: Callable[[int], None]
    ) -> list[Skipped]:
        """Pack images with their stamps; returns those that could not be read at all."""
        skipped: list[Skipped] = []
        self.index.pixels.touch()
        file = open(self.index.pixels, "r+b")  # noqa: SIM115 (closing must not hide why writing failed)
        try:
            file.seek(
                self.rows * self.index.row_bytes
            )  # over what a killed process wrote and did not list
            saved = time.monotonic()
            for done, prepared in enumerate(_in_order(self._prepared, images), start=1):
                if isinstance(prepared, Skipped):
                    skipped.append(prepared)
                else:
                    self._add(file, *prepared)
                if time.monotonic() - saved > SAVED_EVERY:
                    self._save(file)
                    saved = time.monotonic()
                count(done)
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

    def _prepared(
        self, image: StoredImage, stamp: str
    ) -> tuple[Entry, np.ndarray | None] | Skipped:
        """In a thread: read, and decode unless the same bytes are there already."""
        try:
            data = image.read()
        except MemoryError:
            return Skipped(image.name, NO_MEMORY)
        except (OSError, ValueError) as error:
            return Skipped(image.name, f"it cannot be read ({first_line(error)})")
        digest = digest_of(data)
        if digest in self.by_digest:
            return Entry(image.name, stamp, digest), None
        square, content, signature = None, "", ""
        try:
            if self.fit == SIGNATURE:
                decoded = decode(data, SIGNATURE_SIDE)
                content, signature = content_of(data), signature_of(decoded.image)
            else:
                square, decoded = prepare(data, self.view, self.fit)
        except MemoryError:  # while it is resized; decoding says so itself
            return Skipped(image.name, NO_MEMORY)
        except TemporaryFault as error:
            return Skipped(image.name, error.message)
        except DataError as error:
            return Entry(image.name, stamp, digest, broken=error.message), None
        entry = Entry(
            image.name,
            stamp,
            digest,
            NOT_STORED,
            decoded.width,
            decoded.height,
            content=content,
            signature=signature,
        )
        return entry, square if self.store else None

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
        self.index.append(self.waiting)
        self.waiting = []


def _in_order(
    make: Callable[[StoredImage, str], Any], images: Iterable[tuple[StoredImage, str]]
) -> Iterator[Any]:
    """Yield what threads make of each image, in the order of the images."""
    threads = decoding_threads()
    pending: deque[Future] = deque()
    try:
        for image, stamp in images:
            pending.append(threads.submit(make, image, stamp))
            if len(pending) > MAX_PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def _stamps(
    images: Sequence[StoredImage], report: DataProgress
) -> tuple[dict[int, str], list[Skipped]]:
    """The stamps of the images that are there, by their index, and the others."""
    stamps: dict[int, str] = {}
    skipped: list[Skipped] = []
    began = time.monotonic()
    for at, image in enumerate(images):
        try:
            stamps[at] = image.stamp()
        except FileNotFoundError:
            skipped.append(Skipped(image.name, "there is no such file"))
        except (OSError, ValueError) as error:
            skipped.append(Skipped(image.name, f"it cannot be read ({first_line(error)})"))
        if at % 1000 == 999 and time.monotonic() - began > 1:
            report(at + 1, len(images), "looking for")
    return stamps, skipped


def _known(index: PackedIndex, name: str, stamp: str, store: bool) -> bool:
    entry = index.entries.get(name)
    if entry is None or entry.stamp != stamp:
        return False
    return bool(entry.broken) or not store or entry.row != NOT_STORED


def _result(
    index: PackedIndex,
    images: Sequence[StoredImage],
    stamps: dict[int, str],
    skipped: list[Skipped],
    side: int,
    store: bool,
) -> Packed:
    usable, broken = [], []
    for at, stamp in stamps.items():
        name = images[at].name
        if _known(index, name, stamp, store):  # else it could not be read now
            (broken if index.entries[name].broken else usable).append(at)
    skipped = [
        *skipped,
        *(Skipped(images[at].name, index.entries[images[at].name].broken) for at in broken),
    ]
    entries = [index.entries[images[at].name] for at in usable]
    return Packed(_stored(index, side, store), usable, entries, skipped)


def _stored(index: PackedIndex, side: int, store: bool) -> np.ndarray:
    if not store or not index.rows:  # an empty file cannot be mapped
        return np.zeros((0, side, side, 3), np.uint8)
    return np.memmap(index.pixels, np.uint8, "r", shape=(index.rows, side, side, 3))


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
        return _too_small(folder, max(0, needed - _stored_bytes(folder)), 0, can_stream)
    return DataError(
        f"Cannot write images to {folder}: {error.strerror or error}.",
        hint="LAPCLIP_CACHE=FOLDER with a folder that can be written to and has room",
    )

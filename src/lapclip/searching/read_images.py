"""Images read in threads, ahead of the model: what each is, when it was taken, and the square the model sees. For
indexes and for `lapclip embed`.

One thread reads, and more where that is too slow: more threads than are needed cost the model time where it computes on
the same cores.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image

from lapclip.data.decode import NO_MEMORY, TemporaryFault, decode, read_header
from lapclip.data.find_images import Stamp
from lapclip.data.packed_index import digest_of
from lapclip.data.pixels import View, fit_image
from lapclip.data.table import StoredImage
from lapclip.errors import DataError, first_line
from lapclip.paths import LARGEST_FILE

SHARPNESS = 2
"""A JPEG is decoded at a fraction of its size while its short side stays this many times what the model sees."""
EXIF_FOLDER, TAKEN, CHANGED = 0x8769, 0x9003, 0x0132
"""EXIF: where the camera's own entries are, when the photo was taken, and when it was last changed."""
PERIOD = 0.5
"""Seconds after which it is checked whether results were waited for."""
PATIENCE = 0.05
"""Share of the time that may be spent waiting before more threads are taken."""
NO_STAMP = Stamp(0, 0)
"""Of what is no file of its own."""
Item = TypeVar("Item")
Made = TypeVar("Made")


class Read(NamedTuple):
    """What a file holds. Exactly one of square, reason, passing and missing is there, or none where its bytes have a
    vector already."""

    stamp: Stamp
    digest: str = ""
    taken: float | None = None
    width: int = 0
    height: int = 0
    square: np.ndarray | None = None
    reason: str = ""
    """Why it is no image, until the file changes."""
    passing: str = ""
    """Why it could not be read this time."""
    missing: bool = False


def read_image(path: Path, stamp: Stamp, view: View, has_vector: Callable[[str], bool]) -> Read:
    """A file as it is now, which may not be as it was when it was listed."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            stamp = Stamp.of(status)
            if status.st_size > LARGEST_FILE:
                return Read(stamp, reason=f"it has more than {LARGEST_FILE // 10**6} MB")
            data = file.read()
    except FileNotFoundError:
        return Read(stamp, missing=True)
    except (OSError, ValueError, MemoryError) as error:
        return Read(stamp, passing=fault_text(error))
    digest = digest_of(data)
    return Read(stamp, digest) if has_vector(digest) else read_data(data, view, stamp, digest)


def read_stored(image: StoredImage, view: View) -> Read:
    """An image of a data set, wherever it lies."""
    try:
        return read_data(image.read(), view)
    except (OSError, ValueError, MemoryError) as error:
        return Read(NO_STAMP, passing=fault_text(error))


def fault_text(error: Exception) -> str:
    """Return why a file could not be read this time."""
    if isinstance(error, MemoryError):
        return NO_MEMORY
    reason = getattr(error, "strerror", None) or first_line(error)
    return f"it cannot be read ({reason})"


def read_data(data: bytes, view: View, stamp: Stamp = NO_STAMP, digest: str = "") -> Read:
    """What the bytes of a file hold."""
    try:
        header = read_header(data)
        taken = taken_at(header.image)
        decoded = decode(header, SHARPNESS * view.resized, defer_profile=True)
        square = view.finish(decoded, fit_image(decoded.image, view))
    except TemporaryFault as error:
        return Read(stamp, passing=error.message)
    except DataError as error:
        return Read(stamp, digest, reason=error.message)
    except MemoryError:
        return Read(stamp, passing=NO_MEMORY)
    except Exception as error:  # one odd file is no reason to stop; it is listed with what was odd
        return Read(stamp, digest, reason=f"it is damaged ({first_line(error)})")
    return Read(stamp, digest, taken, decoded.width, decoded.height, square)


def taken_at(image: Image.Image) -> float | None:
    """When the camera says that a photo was taken, in seconds, by the clock of this computer's time zone."""
    with suppress(Exception):  # EXIF blocks are damaged in every way there is
        exif = image.getexif()
        text = exif.get_ifd(EXIF_FOLDER).get(TAKEN) or exif.get(CHANGED)
        if text:
            return datetime.strptime(str(text).strip("\x00 ")[:19], "%Y:%m:%d %H:%M:%S").timestamp()
    return None


def heic_is_unknown(path: str) -> bool:
    """Whether a file is a HEIC that cannot be read here, so that it need not be opened to know."""
    return path.lower().endswith((".heic", ".heif")) and not _reads_heic()


@cache
def _reads_heic() -> bool:
    try:
        import pillow_heif  # noqa: F401  # pyright: ignore[reportMissingImports]

        return True
    except ImportError:
        return False


def made_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], ahead: int, most_threads: int
) -> Iterator[Made]:
    """What is made of each item, in their order, up to `ahead` of them before they are wanted."""
    todo: SimpleQueue[tuple[Future[Made], Item] | None] = SimpleQueue()
    threads: list[threading.Thread] = []

    def work() -> None:
        while (job := todo.get()) is not None:
            future, item = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(make(item))
                except BaseException as error:
                    future.set_exception(error)

    def start(count: int) -> None:
        for _ in range(
            count
        ):  # nobody waits for a daemon when the process ends, as for the threads of an executor
            threads.append(threading.Thread(target=work, name="lapclip-reading", daemon=True))
            threads[-1].start()

    waiting: deque[Future[Made]] = deque()
    source, waited, worked = iter(items), 0.0, 0.0
    start(1)
    try:
        while True:
            while len(waiting) < ahead and (item := next(source, waiting)) is not waiting:
                waiting.append(Future())
                todo.put((waiting[-1], item))  # type: ignore[arg-type]
            if not waiting:
                return
            began = time.monotonic()
            made = waiting.popleft().result()
            ready = time.monotonic()
            yield made
            worked += time.monotonic() - ready
            if (
                worked > 0.01
            ):  # else nobody has worked yet, and the first results are always waited for
                waited += ready - began
            if waited + worked > PERIOD:
                if waited > PATIENCE * (waited + worked):
                    start(min(len(threads), most_threads - len(threads)))
                waited = worked = 0.0
    finally:
        # Not waited for: an image can take a minute, and whoever pressed Ctrl-C would wait for what is thrown away.
        for future in waiting:
            future.cancel()
        for _ in threads:
            todo.put(None)


def in_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """As many as the model takes at once. What is no image is counted too: it is quick."""
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch

"""The data of a run as a few files, for a computer that has no other copy of it: a description, and the pixels of each
split as raw rows in order.

The host makes them while they are read. A guest writes them into its cache, chunk by chunk, each compared with its
digest; what was broken off goes on where it was, to the byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np

from lapclip.config import Config, DataConfig
from lapclip.data.dataset import DataSet, Pairs, Pixels
from lapclip.data.loading import load_data
from lapclip.data.packed_store import room_left
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.errors import DataError, JoinError, RunError
from lapclip.paths import cache_folder, digest_of_bytes, flush, make_private, parse_json, replace
from lapclip.progress import DataProgress
from lapclip.text import size as size_text
from lapclip.together import Agreement

CHUNK = 8 * 2**20
"""Bytes that have one digest."""
ABOUT = "about.json"
SPARE = 200_000_000
"""Bytes that the disk has left after the data was brought over, for what a run writes."""
PREPARING = "preparing to send"
FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")

Report = Callable[[int, int], None]
"""Called with the bytes that are there and all of them."""


class Part(Protocol):
    """One file of a bundle, made while it is read."""

    size: int

    def read(self, first: int, last: int) -> bytes:
        """Its bytes from the first to before the last."""
        ...


class TextPart:
    """The description of the data."""

    def __init__(self, text: bytes) -> None:
        self._text, self.size = text, len(text)

    def read(self, first: int, last: int) -> bytes:
        return self._text[first:last]


class PixelPart:
    """The pixels of a split, row after row."""

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self._row = int(np.prod(pixels.shape[1:]))
        self.size = len(pixels) * self._row

    def read(self, first: int, last: int) -> bytes:
        above = first // self._row
        rows = np.ascontiguousarray(self._pixels[above : -(-last // self._row)])
        return rows.tobytes()[first - above * self._row : last - above * self._row]


@dataclass(frozen=True)
class FileDigests:
    """What a file of a bundle is: its size, and the digest of each of its chunks."""

    size: int
    chunks: tuple[str, ...]

    @classmethod
    def of(cls, told: Any) -> FileDigests:
        """As a manifest has it. Raises ValueError where that is none."""
        match told:
            case {"size": int(size), "chunks": [*chunks]} if size > 0 and len(chunks) == -(
                -size // CHUNK
            ):
                if all(
                    isinstance(chunk, str) and re.fullmatch("[0-9a-f]{64}", chunk)
                    for chunk in chunks
                ):
                    return cls(size, tuple(chunks))
        raise ValueError("a file in it has no size, or not as many digests as chunks")

    def chunk(self, number: int) -> tuple[int, int]:
        """Where a chunk begins and ends."""
        return number * CHUNK, min(self.size, (number + 1) * CHUNK)


def parts_of(data: DataSet) -> list[Part]:
    """The files of a bundle: the description, then the pixels of each split in its order."""
    return [
        TextPart(_description(data)),
        *(PixelPart(pairs.pixels) for pairs in data.splits.values()),
    ]


def digests_of(parts: Sequence[Part], progress: Report | None = None) -> list[FileDigests]:
    """The digests of all files, for which each is read once."""
    total, done, found = sum(part.size for part in parts), 0, []
    for part in parts:
        chunks = []
        for first in range(0, part.size, CHUNK):
            content = part.read(first, min(part.size, first + CHUNK))
            chunks.append(digest_of_bytes(content))
            done += len(content)
            if progress:
                progress(done, total)
        found.append(FileDigests(part.size, tuple(chunks)))
    return found


def _description(data: DataSet) -> bytes:
    splits = [
        {
            "name": name,
            "shape": list(pairs.pixels.shape),
            "captions": [list(captions) for captions in pairs.captions],
            "names": list(pairs.names),
            "aspects": None if pairs.aspects is None else pairs.aspects.tolist(),
            "identities": None if pairs.identities is None else pairs.identities.tolist(),
            "labels": None if pairs.labels is None else pairs.labels.tolist(),
        }
        for name, pairs in data.splits.items()
    ]
    whole = {
        "fingerprint": data.fingerprint,
        "alphabet": data.alphabet,
        "notes": list(data.notes),
        "classes": list(data.classes),
        "how_split": data.how_split,
        "splits": splits,
    }
    return json.dumps(whole).encode()


def bundle_folder(host: str, fingerprint: str, view: View) -> Path:
    """Where the cache has what a host calls the data of that fingerprint, as a model with that view sees it."""
    return (
        cache_folder()
        / f"bundle-{digest_of_bytes(f'{host} {fingerprint} {view.key}'.encode())[:24]}"
    )


def read_bundle(host: str, fingerprint: str, view: View) -> DataSet | None:
    """The data that was brought over, or None where it was not."""
    folder = bundle_folder(host, fingerprint, view)
    try:
        about = parse_json((folder / ABOUT).read_text(encoding="utf-8"))
        splits = {
            part["name"]: _pairs(folder / _name(at), part)
            for at, part in enumerate(about["splits"], start=1)
        }
        if about["fingerprint"] != fingerprint or not {"train", "val"} <= splits.keys():
            raise ValueError("it is of other data")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{folder} cannot be read: {error}.", hint="remove it, and lapclip join again"
        ) from None
    return DataSet(
        splits,
        about["fingerprint"],
        about["alphabet"],
        [str(note) for note in about["notes"]],
        [str(name) for name in about["classes"]],
        str(about["how_split"]),
    )


def _name(number: int) -> str:
    """A file of a bundle in its folder. Names never come from the host."""
    return ABOUT if number == 0 else f"{number}.pixels"


def _pairs(path: Path, part: dict[str, Any]) -> Pairs:
    rows, *square = (int(length) for length in part["shape"])
    if len(part["captions"]) != rows or rows * int(np.prod(square)) != path.stat().st_size:
        raise ValueError(f"{path.name} has not as many images as there are captions")
    arrays = {"aspects": np.float32, "identities": np.uint64, "labels": np.int64}
    told: dict[str, Any] = {
        name: None if part[name] is None else np.array(part[name], dtype)
        for name, dtype in arrays.items()
    }
    if any(array is not None and array.shape != (rows,) for array in told.values()):
        raise ValueError(f"not all images of {path.name} are described")
    captions = [tuple(str(caption) for caption in captions) for captions in part["captions"]]
    names = [str(name) for name in part["names"]]
    return Pairs(
        np.memmap(path, np.uint8, "r", shape=(rows, *square)), captions, names or (), **told
    )


def load_again(config: Config, fingerprint: str, progress: DataProgress | None) -> DataSet:
    """The data of a run that goes on here: what was brought over, else what its settings name. A guest opens no path
    that the host names: it draws the images, has them in its cache, or the user here said where they are."""
    view, agreed = View.of(config.model), Agreement.of_this_process()
    if agreed:
        agreed.check(config, fingerprint)
    # What a host called the data of that fingerprint is never taken for the user's own.
    if (
        agreed
        and FINGERPRINT.fullmatch(fingerprint)
        and (found := read_bundle(agreed.host, fingerprint, view))
    ):
        return found
    if agreed and not find_source(config.data.source).is_drawn and not agreed.source:
        raise RunError(
            "The data that was brought over is no longer in the cache.", hint="lapclip join again"
        )
    data = config.data
    if agreed and agreed.source:
        data = dataclasses.replace(data, source=agreed.source, pictures=DataConfig().pictures)
    return load_data(data, view, progress)


Read = Callable[[int, int, int], Iterable[bytes]]
"""Gives the bytes of a file, by its number, from the first to before the last, in pieces."""


def bring_over(
    folder: Path, files: Sequence[FileDigests], read: Read, progress: Report | None = None
) -> None:
    """Bring all files into a folder, which appears when they are whole. What is there of an earlier try is compared
    with its digests and stays."""
    if folder.exists():
        return
    make_private(folder.parent)
    incoming = folder.with_name(f"{folder.name}.incoming")
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():  # another process brought it meanwhile
            return
        make_private(incoming)
        total, there = sum(file.size for file in files), 0
        for number, _ in enumerate(files):
            path = incoming / _name(number)
            there += path.stat().st_size if path.exists() else 0
        _check_room(folder, total - there)
        before = 0
        for number, file in enumerate(files):
            report = _offset(progress, before, total)
            _bring_file(
                incoming / _name(number),
                file,
                lambda first, last, at=number: read(at, first, last),
                report,
            )
            before += file.size
        replace(incoming, folder)


def _offset(progress: Report | None, before: int, total: int) -> Callable[[int], None]:
    return (lambda done: progress(before + done, total)) if progress else (lambda done: None)


def _check_room(folder: Path, needed: int) -> None:
    free = room_left(folder)
    if needed + SPARE > free:
        raise JoinError(
            f"The data takes {size_text(needed)}, and the disk of {folder.parent} has {size_text(free)} left.",
            hint="lapclip clean, or LAPCLIP_CACHE on another disk",
        )


def _bring_file(
    path: Path,
    file: FileDigests,
    read: Callable[[int, int], Iterable[bytes]],
    report: Callable[[int], None],
) -> None:
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as target:
        for number, digest in enumerate(file.chunks):
            first, last = file.chunk(number)
            whole = _bring_chunk(target, (first, last), digest, read, report)
            # What an earlier try left may be damaged, so a chunk is asked for once more from its beginning.
            if not whole and not _bring_chunk(
                target, (first, last), digest, read, report, afresh=True
            ):
                raise JoinError(
                    f"Bytes {first:,} to {last:,} of {path.name} do not have the digest that the host gave.",
                    hint="lapclip join again",
                )
        target.truncate(file.size)
    flush(path)


def _bring_chunk(
    target: Any,
    ends: tuple[int, int],
    digest: str,
    read: Callable[[int, int], Iterable[bytes]],
    report: Callable[[int], None],
    *,
    afresh: bool = False,
) -> bool:
    """Have a chunk in the file, from what is there and what is read; whether it has its digest."""
    first, last = ends
    target.seek(first)
    there = b"" if afresh else target.read(last - first)
    found, done = hashlib.sha256(there), first + len(there)
    target.seek(done)
    if done < last:
        for piece in read(done, last):
            target.write(piece[: last - done])
            found.update(piece[: last - done])
            done = min(last, done + len(piece))
            report(done)
    report(done)
    target.flush()
    return done == last and found.hexdigest() == digest

"""`lapclip embed`: the vectors of images and captions in a file for other programs. What is done survives a kill
(`UnfinishedVectors`); the file is written from it in one go (`lapclip.data.vector_files`)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lapclip import __version__
from lapclip.commands.unfinished_vectors import UnfinishedVectors
from lapclip.config import AUTO, DataConfig, Layer, build_config, parse_settings
from lapclip.data.columns import NotATable
from lapclip.data.decode import DECODING_VERSION
from lapclip.data.find_images import Scan, is_inside, walk
from lapclip.data.loading import left_out, list_data
from lapclip.data.packed_store import room_left
from lapclip.data.pixels import RESIZING_VERSION, View
from lapclip.data.sources.files import NoCaptions
from lapclip.data.sources.registry import BUILT_IN, Specificity, absolute, forms_in
from lapclip.data.table import ImageFile, Row, Skipped
from lapclip.data.vector_files import FINGERPRINT, Embedded, VectorFile, vector_file
from lapclip.embedder import Embedder, Encoder, load, naming_device_flag
from lapclip.errors import DataError, RunError, nearest
from lapclip.machine.facts import logical_cores
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress, Progress, Status
from lapclip.searching.read_images import Read, in_batches, made_ahead, read_stored
from lapclip.searching.search_model import CPU_BATCH
from lapclip.searching.update_index import AHEAD
from lapclip.text import counted, size
from lapclip.which_model import WhichModel, newest_on_photos, that_made_an_index, which_model

SAVED_EVERY = 1.0
"""Seconds of work that a killed process may lose."""
PLAIN = "no captions: all images in the folder and the folders in it"


@dataclass(frozen=True)
class EmbedOptions:
    """What the user asked to embed, and where to."""

    data: str
    out: Path
    model: str | None = None
    device: str = AUTO
    split: str | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Callbacks:
    """Callbacks for status and progress."""

    status: Status = lambda _: None
    data: DataProgress | None = None
    counting: Progress = lambda done, total: None


class FolderRows(Sequence[Row]):
    """The images of a folder, as rows without captions. Only their names are kept: there may be a million."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = [Path(path).as_posix() for path, _ in Scan(folder)]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, at: Any) -> Any:
        name = self._names[at]
        return Row(ImageFile(self._folder / name, name), ())


@dataclass(frozen=True)
class ToEmbed:
    """Images, in an order that stays the same."""

    rows: Sequence[Row]
    how: str
    """What was recognised."""
    skipped: Sequence[Skipped] = ()
    """What the data names and what cannot be used."""
    digest: str = ""
    """Changes with any image, caption or split; images are known by the dates and sizes of their files."""

    @property
    def folder(self) -> str:
        """The folder that the names of images are relative to; empty where they are no files of their own."""
        first = self.rows[0].image
        return (
            str(first.path.absolute().parents[first.name.count("/")])
            if isinstance(first, ImageFile)
            else ""
        )


def embed(request: EmbedOptions, callbacks: Callbacks = Callbacks()) -> dict[str, Any]:
    """Embed images and their captions, or go on with what was begun, and write the file."""
    began = time.monotonic()
    file, saved = vector_file(request.out), UnfinishedVectors(request.out)
    _check_outside(request)
    file.check_packages()
    finished = file.check_free(is_unfinished=saved.folder.exists())
    with saved.locked():
        which = which_model(
            request.model, lambda: _same_as_before(saved.about or finished) or newest_on_photos()
        )
        callbacks.status("reading the model")
        model = _open(which, request.device)
        found = _find(request, model.view, callbacks.data)
        about = {
            "lapclip": __version__,
            FINGERPRINT: model.fingerprint(),
            "model": which.name,
            "reference": which.reference,
            "source": absolute(request.data),
            "folder": found.folder,
            "split": request.split,
            "dimension": model.embedding,
            "data": found.digest,
        }
        notes, before = [found.how], 0
        is_there = (
            finished and finished.get("folder") == found.folder
        )  # it may have been moved, and names lead from it
        if finished and is_there and not saved.about and _changed(finished, about) is None:
            about, before = finished, finished["images"]
            notes.append(
                f"{request.out} is up to date: the same images, embedded with the same model"
            )
            if finished.get("unreadable"):
                images = counted(finished["unreadable"], "image")
                notes.append(f"{images} could not be read when it was written")
            unreadable = []
        else:
            notes += _begin(saved, about)
            before = saved.counts["image"]
            _check_room(file, found.rows, saved.rows, model)
            with which.in_use():
                _Work(saved, found, model).to_the_end(callbacks.counting)
            callbacks.status(f"writing {request.out}")
            about = _write(file, found, saved, about)
            saved.done()
            unreadable = _unreadable(found, saved)
    return {
        "file": str(request.out),
        "rows": about["images"],
        "captions": about["captions"],
        "dimension": about["dimension"],
        "fingerprint": about[FINGERPRINT],
        "seconds": time.monotonic() - began,
        "embedded": about["images"] - before,
        "bytes": sum(path.stat().st_size for path in file.paths),
        "model": str(which.path),
        "why_model": which.why,
        "data": request.data,
        "unreadable": [
            {"path": one.where, "reason": one.why} for one in [*found.skipped, *unreadable]
        ],
        "notes": [note for note in (*notes, left_out([*found.skipped, *unreadable])) if note],
    }


def _begin(saved: UnfinishedVectors, about: dict[str, Any]) -> list[str]:
    """Go on with what is there, or begin; and what the user should know of that."""
    if saved.about is None:
        saved.begin(about)
        return []
    changed = _changed(saved.about, about)
    if changed is None:
        return [f"went on from {saved.rows:,} images that were embedded before"]
    saved.begin(about)
    return [f"{changed} since an earlier start that did not finish, so it was begun anew"]


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What has changed since something was embedded, if anything."""
    if (before.get(FINGERPRINT), before.get("dimension")) != (now[FINGERPRINT], now["dimension"]):
        return f"the model has changed ({before.get('model')} then, {now['model']} now)"
    return "images, captions or splits have changed" if before.get("data") != now["data"] else None


def _write(
    file: VectorFile, found: ToEmbed, saved: UnfinishedVectors, about: dict[str, Any]
) -> dict[str, Any]:
    """Write the file from what was saved; returns what it says of itself."""
    if not saved.counts["image"]:
        saved.done()
        why = left_out(_unreadable(found, saved))
        raise DataError(f"None of the images can be read: {why}.", hint="lapclip data check DATA")
    unreadable = [row for row, _ in saved.unreadable]
    about = {
        **about,
        "images": saved.counts["image"],
        "captions": saved.counts["text"],
        "unreadable": len(unreadable),
    }
    if saved.passing:
        about["data"] = ""  # some may be readable the next time, so that it is not up to date
    kept = np.delete(np.arange(len(found.rows)), unreadable)
    file.check_free(is_unfinished=True)  # the user may have put something there since
    file.write(Embedded(about, found.rows, kept, saved.vectors("image"), saved.vectors("text")))
    return about


def _unreadable(found: ToEmbed, saved: UnfinishedVectors) -> list[Skipped]:
    return [Skipped(found.rows[row].image.name, why) for row, why in saved.unreadable]


def _check_outside(request: EmbedOptions) -> None:
    """Nothing is written into the user's images; a file of vectors there would be taken for a table of captions."""
    top = os.path.realpath(os.path.expanduser(request.data))
    if (
        request.data not in BUILT_IN
        and os.path.isdir(top)
        and is_inside(os.path.realpath(request.out), top)
    ):
        other = Path(os.path.relpath(Path(top).parent)) / request.out.name
        raise DataError(
            f"{request.out} lies in {request.data}, among the images.", hint=f"--out {other}"
        )


def _same_as_before(about: dict[str, Any] | None) -> WhichModel | None:
    """The model that made the file or its beginning, so that its vectors can be compared with those from before."""
    reference = (about or {}).get("reference")
    maker = that_made_an_index(reference) if isinstance(reference, str) else None
    return replace(maker, why="it made the file that is there") if maker else None


def _open(which: WhichModel, device: str) -> Encoder:
    with naming_device_flag():
        model = load(which.path, device)
    if not np.isfinite(model.encode_text(["an image"])).all():
        raise RunError(
            f"The model in {which.path} gives no numbers: its training broke down.",
            hint="lapclip doctor",
        )
    return model


def _find(request: EmbedOptions, view: View, progress: DataProgress | None) -> ToEmbed:
    """The images, with captions and splits where the data has them."""
    asked = parse_settings(list(request.settings))
    first = Layer("the command", {"data": {"source": request.data}})
    config = build_config([first, asked], SHAPES).data
    found = _with_captions(
        config, view, progress, prompted="prompts" in asked.values.get("data", {})
    )
    if found is None:
        found = ToEmbed(FolderRows(Path(config.source).expanduser()), PLAIN)
        if not found.rows:
            raise DataError(
                f"There is no image in {config.source}.",
                hint="a folder with JPEG, PNG, WebP or HEIC files",
            )
    if request.split is not None:
        splits = dict.fromkeys(row.split for row in found.rows)
        if request.split not in splits:
            known = (
                nearest(request.split, [split for split in splits if split])
                if any(splits)
                else "It has none."
            )
            raise DataError(
                f"The data itself names no split {request.split}. {known}", hint="without --split"
            )
        found = replace(found, rows=[row for row in found.rows if row.split == request.split])
    return replace(found, digest=_digest(found.rows, found.digest))


def _with_captions(
    config: DataConfig, view: View, progress: DataProgress | None, *, prompted: bool
) -> ToEmbed | None:
    """A data set as `lapclip train` reads it; None for a folder of images without captions.

    Folders may look like classes and be years or albums: captions are made of their names only where prompts are given.
    """
    folder = Path(config.source).expanduser()
    plain = config.source not in BUILT_IN and folder.is_dir() and not prompted
    if (
        plain
        and (forms := forms_in(list(walk(folder, []))))
        and forms[0].specificity == Specificity.CLASS_FOLDERS
    ):
        return None
    try:
        listing = list_data(config, view, progress)
    except (NoCaptions, NotATable):
        if plain and any(True for _ in Scan(folder)):
            return None
        raise
    table = listing.table
    if plain and table.classes:  # in the only folder of this one
        return None
    return ToEmbed(
        table.rows, table.how, table.skipped, listing.drawn.fingerprint if listing.drawn else ""
    )


def _digest(rows: Sequence[Row], drawn: str) -> str:
    digest = hashlib.sha256(f"{DECODING_VERSION} {RESIZING_VERSION} {drawn}".encode())
    for row in rows:
        try:
            stamp = row.image.stamp()
        except (OSError, ValueError):
            stamp = ""
        digest.update(json.dumps([row.image.name, stamp, row.captions, row.split]).encode())
    return digest.hexdigest()[:16]


def _check_room(file: VectorFile, rows: Sequence[Row], done: int, model: Encoder) -> None:
    """Vectors are there twice for a moment: as they were saved, and in the file."""
    captions = sum(len(rows[at].captions) for at in range(done, len(rows)))
    needed, free = (
        2 * 4 * model.embedding * (len(rows) - done + captions),
        room_left(file.path.absolute().parent),
    )
    if needed > free:
        raise DataError(
            f"The disk of {file.path} has too little room: the vectors take {size(needed)} while they are written, and "
            f"{size(free)} are free.",
            hint="--out on a larger disk",
        )


class _Work:
    """One pass over the rows that are not done."""

    def __init__(self, saved: UnfinishedVectors, found: ToEmbed, model: Encoder) -> None:
        self.saved, self.rows, self.model = saved, found.rows, model
        on_cpu = not isinstance(model, Embedder) or model.device.is_cpu
        self.batch = CPU_BATCH if on_cpu else model.batch
        self._start_chunk()

    def _start_chunk(self) -> None:
        self.images: list[np.ndarray] = []
        self.texts: list[np.ndarray] = []
        self.unreadable: list[tuple[int, str]] = []
        self.passing = 0
        self.since = time.monotonic()

    def to_the_end(self, progress: Progress) -> None:
        done, total = self.saved.rows, len(self.rows)
        progress(done, total)
        try:
            for batch in in_batches(self._read_ahead(), self.batch):
                self._take(batch)
                done += len(batch)
                progress(done, total)
                if done == total or time.monotonic() - self.since > SAVED_EVERY:
                    self.saved.save(
                        done,
                        np.array(self.images),
                        np.array(self.texts),
                        self.unreadable,
                        self.passing,
                    )
                    self._start_chunk()
        except (
            KeyboardInterrupt
        ):  # in the middle of anything: what is not saved yet is little, and is lost
            raise KeyboardInterrupt(
                f"Stopped. {self.saved.rows:,} of {total:,} images are embedded, in {self.saved.folder}; the same "
                "command goes on."
            ) from None

    def _read_ahead(self) -> Iterator[tuple[int, Read]]:
        """Rows in order, their images read in threads a few batches ahead."""
        view = self.model.view
        todo = range(self.saved.rows, len(self.rows))
        return made_ahead(
            lambda at: (at, read_stored(self.rows[at].image, view)),
            todo,
            AHEAD * self.batch,
            logical_cores(),
        )

    def _take(self, batch: Sequence[tuple[int, Read]]) -> None:
        squares = [read.square for _, read in batch if read.square is not None]
        vectors = iter(self.model.encode_pixels(np.stack(squares)) if squares else ())
        captions: list[str] = []
        for at, read in batch:
            vector = next(vectors) if read.square is not None else None
            if vector is None or not np.isfinite(vector).all():
                self.unreadable.append(
                    (at, read.reason or read.passing or "the model gives no numbers for it")
                )
                self.passing += bool(read.passing)
                continue
            self.images.append(vector)
            captions += self.rows[at].captions
        if captions:
            self.texts += self._embed_texts(captions)

    def _embed_texts(self, captions: Sequence[str]) -> list[np.ndarray]:
        rows = {caption: at for at, caption in enumerate(dict.fromkeys(captions))}
        vectors = self.model.encode_text(list(rows))
        return [vectors[rows[caption]] for caption in captions]

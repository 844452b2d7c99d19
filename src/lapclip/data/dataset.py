"""A data set: the images and captions of each split, row by row, and which images a run has learnt from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lapclip.paths import open_own


class Pixels(Protocol):
    """Images of one size, uint8 of shape (rows, side, side, 3), by row: in memory, in a packed store, or decoded
    when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        """One row, a slice of rows, or the rows of an array of indices."""
        ...


@dataclass(frozen=True)
class Pairs:
    """The images of one split and the captions of each."""

    pixels: Pixels
    captions: Sequence[Sequence[str]]
    names: Sequence[str] = ()
    """How a person finds each image; empty where they are drawn."""
    aspects: np.ndarray | None = None
    """Width to height of each image before it was squeezed into a square; None where the squares were cut out."""
    sequential: bool = False
    """Whether rows next to each other are read faster together, so that an order should keep them close."""
    identities: np.ndarray | None = None
    """A number for each image that equal bytes share and others do not, uint64; None where images are drawn."""
    labels: np.ndarray | None = None
    """The class of each image, as its index in the data set's `classes`; None where there are none."""
    files: np.ndarray | None = None
    """A number for each image that those of one file share, where they are read from files each time; else None."""

    def __len__(self) -> int:
        return len(self.captions)

    def select(self, rows: Sequence[int]) -> Pairs:
        """Some of the rows, in that order. No image is copied."""
        every = (self.aspects, self.identities, self.labels, self.files)
        aspects, identities, labels, files = (
            None if part is None else part[list(rows)] for part in every
        )
        return Pairs(
            select_pixels(self.pixels, rows),
            [self.captions[row] for row in rows],
            [self.names[row] for row in rows] if self.names else (),
            aspects,
            self.sequential,
            identities,
            labels,
            files,
        )

    def repeats(self) -> dict[str, float]:
        """How many captions there are, how many different ones, and the share of images with one of their own.

        Captions that images share set ceilings: of those with the same words only one can find its own image.
        """
        images = Counter(caption for options in self.captions for caption in set(options))
        own = sum(any(images[caption] == 1 for caption in options) for options in self.captions)
        return {
            "captions": images.total(),
            "distinct": len(images),
            "told_apart": own / max(1, len(self)),
        }


class SelectedPixels:
    """Some rows of images, in an order of their own."""

    def __init__(self, pixels: Pixels, rows: np.ndarray) -> None:
        self._pixels, self._rows = pixels, rows
        self.shape = (len(rows), *pixels.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        return self._pixels[self._rows[rows]]


def select_pixels(pixels: Pixels, rows: Sequence[int]) -> Pixels:
    """Some rows of images. Neighbours are a slice, which a memory map does not copy."""
    chosen = np.array(rows, dtype=np.int64)
    first = int(chosen[0]) if len(chosen) else 0
    if np.array_equal(chosen, np.arange(first, first + len(chosen))):
        return pixels[first : first + len(chosen)]
    return SelectedPixels(pixels, chosen)


class JoinedPixels:
    """The images of several splits, one split after the other."""

    def __init__(self, splits: Sequence[Pixels]) -> None:
        self._splits = splits
        self._ends = np.cumsum([len(split) for split in splits])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._splits[0].shape[1:])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        asked = np.arange(len(self))[rows]
        if asked.ndim == 0:
            return self[asked[None]][0]
        found = np.empty((len(asked), *self.shape[1:]), dtype=np.uint8)
        split_of = np.searchsorted(self._ends, asked, side="right")
        for at, split in enumerate(self._splits):
            here = split_of == at
            if here.any():
                found[here] = split[asked[here] - (self._ends[at] - len(split))]
        return found


def join_splits(splits: Sequence[Pairs]) -> Pairs:
    """Several splits as one. No image is copied."""
    if len(splits) == 1:
        return splits[0]
    labels = [split.labels for split in splits]
    known = [own for own in labels if own is not None]
    return Pairs(
        JoinedPixels([split.pixels for split in splits]),
        [captions for split in splits for captions in split.captions],
        [name for split in splits for name in split.names],
        labels=np.concatenate(known) if len(known) == len(splits) else None,
    )


@dataclass(frozen=True)
class DataSet:
    """All splits, the alphabet of the captions where the source declares it, and what identifies the contents."""

    splits: Mapping[str, Pairs]
    fingerprint: str
    alphabet: str | None = None
    notes: Sequence[str] = field(default_factory=list)
    """What the user should know about how the data was read: one line each."""
    classes: Sequence[str] = ()
    """The names of the classes, where the source is a folder of class folders."""
    how_split: str = ""
    """How the splits came about, and what is known of copies; empty where images are drawn."""

    @property
    def train(self) -> Pairs:
        return self.splits["train"]

    @property
    def held_out(self) -> Pairs:
        """The pairs that choose the best model."""
        return self.splits["val"]

    @property
    def final(self) -> tuple[str, Pairs]:
        """The split that the finished model is scored on: one that chose nothing, where there is one."""
        name = "test" if "test" in self.splits else "val"
        return name, self.splits[name]


SEEN = "seen.npy"
"""The images that a run learns from, saved with it, so that an evaluation knows which ones are no test."""


def save_seen(identities: np.ndarray | None, path: Path, start: str = "") -> None:
    """Save the identities of training images, and of those that the model to start from had seen; nothing where they
    are drawn."""
    earlier = _read(seen_by(start))
    if identities is not None or earlier is not None:
        every = [part for part in (identities, earlier) if part is not None]
        with (
            suppress(OSError),
            open(path, "wb") as file,
        ):  # a full disk costs a warning later, not the run
            np.save(file, np.unique(np.concatenate(every)))


def seen_by(model: str) -> Path:
    """Where a run, or the run whose model it is, saves what it learnt from; not there for other models."""
    path = Path(model)
    return path / SEEN if (path / SEEN).exists() else path.parent / SEEN


def count_seen(identities: np.ndarray | None, path: Path) -> int | None:
    """How many of some images a run learnt from; None where that is not known."""
    seen = _read(path)
    return None if identities is None or seen is None else int(np.isin(identities, seen).sum())


def _read(path: Path) -> np.ndarray | None:
    try:
        with open_own(path) as file:
            return np.load(file)
    except (OSError, ValueError, EOFError):
        return None

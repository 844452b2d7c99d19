"""A data set as a table: row by row an image and its captions; one table a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


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
    """The class of each image, as its place in the data set's `classes`; None where there are none."""

    def __len__(self) -> int:
        return len(self.captions)

    def repeats(self) -> dict[str, float]:
        """How many captions there are, how many different ones, and the share of images with one of their own.

        Captions that images share set ceilings: of those with the same words only one can find its own image.
        """
        images = Counter(caption for options in self.captions for caption in set(options))
        own = sum(any(images[caption] == 1 for caption in options) for options in self.captions)
        return {"captions": images.total(), "distinct": len(images), "told_apart": own / max(1, len(self))}


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

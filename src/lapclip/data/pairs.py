"""A data set as a table: row by row a picture and its captions; one table a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """The pictures of one split, uint8 of shape (rows, side, side, 3), and the captions of each."""

    pixels: np.ndarray
    captions: Sequence[Sequence[str]]

    def __len__(self) -> int:
        return len(self.captions)

    def repeats(self) -> dict[str, float]:
        """How many captions there are, how many different ones, and the share of pictures with one of their own.

        Captions that pictures share set ceilings: of those with the same words only one can find its own picture.
        """
        pictures = Counter(caption for options in self.captions for caption in set(options))
        own = sum(any(pictures[caption] == 1 for caption in options) for options in self.captions)
        return {"captions": pictures.total(), "distinct": len(pictures), "told_apart": own / max(1, len(self))}


@dataclass(frozen=True)
class DataSet:
    """All splits, the alphabet of the captions where the source declares it, and what identifies the contents."""

    splits: Mapping[str, Pairs]
    fingerprint: str
    alphabet: str | None = None

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

"""Several splits as one, without copying their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lapclip.data.dataset import Pairs, Pixels


class JoinedPixels:
    """The images of some tables, one table after the other."""

    def __init__(self, parts: Sequence[Pixels]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._parts[0].shape[1:])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        wanted = np.arange(len(self))[rows]
        if wanted.ndim == 0:
            return self[wanted[None]][0]
        found = np.empty((len(wanted), *self.shape[1:]), dtype=np.uint8)
        part_of = np.searchsorted(self._ends, wanted, side="right")
        for at, part in enumerate(self._parts):
            here = part_of == at
            if here.any():
                found[here] = part[wanted[here] - (self._ends[at] - len(part))]
        return found


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Some splits as one."""
    if len(parts) == 1:
        return parts[0]
    labels = [part.labels for part in parts]
    known = [own for own in labels if own is not None]
    return Pairs(
        JoinedPixels([part.pixels for part in parts]),
        [captions for part in parts for captions in part.captions],
        [name for part in parts for name in part.names],
        labels=np.concatenate(known) if len(known) == len(parts) else None,
    )

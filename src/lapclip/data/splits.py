"""Which pictures are for training and which are held out: by picture, never by caption, and stable as data is added."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lapclip.data.table import Row

HELD_OUT = 0.1
"""Share of the pictures in each of `val` and `test`, where the data has no splits of its own."""


def assign_splits(rows: Sequence[Row], seed: int) -> list[str]:
    """The split of each row: the data's own where it has one, else drawn from the picture's name and the seed alone."""
    return [row.split or _drawn(row.picture.name, seed) for row in rows]


def _drawn(name: str, seed: int) -> str:
    place = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()[:8]) / 2**64
    return "val" if place < HELD_OUT else "test" if place < 2 * HELD_OUT else "train"

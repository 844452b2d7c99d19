"""Which images are for training and which are held out: by image, never by caption, and stable as data is added."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lapclip.config import DataConfig
from lapclip.errors import DataError

if TYPE_CHECKING:
    from lapclip.data.table import Row  # which needs `split_named`

HELD_OUT = DataConfig().held_out
MOST_ALIKE = 10
"""Copies of one image that are drawn like any other image, however few images there are. More of them, and more than a
split would hold, are for training: held out, they would be the whole split."""
TRAIN = "train"
_WORDS = {
    "train": ("train", "training", "trainval", "restval", "trn"),
    "val": ("val", "valid", "validation", "validate", "dev", "development", "eval"),
    "test": ("test", "testing", "tst", "heldout", "held_out"),
}
_KNOWN = {word: split for split, words in _WORDS.items() for word in words}


def split_named(text: str) -> str | None:
    """The split that a word such as `Validation` or `restval` means; None where it means none."""
    return _KNOWN.get(text.strip().lower())


def are_drawn(rows: Sequence[Row]) -> bool:
    """Whether a split of the data is drawn; else the data names all that are needed."""
    named = {row.split for row in rows} - {""}
    return "val" not in named and (not named or any(row.split in ("", TRAIN) for row in rows))


def assign_splits(
    rows: Sequence[Row], seed: int, keys: Sequence[str] | None = None, held_out: float = HELD_OUT
) -> list[str]:
    """The split of each row: the data's own where it has one, else drawn from its key and the seed alone.

    A key is a text that copies of one image share, so that all of them are on one side; without keys it is the image's
    name. Where the data names splits, images without one are for training. Where it holds nothing back for choosing
    the best model (`val`), those images are drawn from the training images.
    """
    named = {row.split for row in rows} - {""}
    splits = [row.split or TRAIN for row in rows]
    if not are_drawn(rows):
        return splits
    keys = [row.image.name for row in rows] if keys is None else keys
    copies, most = Counter(keys), max(MOST_ALIKE, held_out * len(rows))
    free = [index for index, split in enumerate(splits) if split == TRAIN]
    some = [index for index in free if copies[keys[index]] <= most] or free
    draws = {index: _draw(keys[index], seed) for index in some}
    for index, drawn in draws.items():
        if drawn < held_out:
            splits[index] = "val"
        elif not named and drawn < 2 * held_out:
            splits[index] = "test"
    # Among very few images chance may leave a split empty that no run can do without.
    if len({keys[index] for index in free}) > 1:
        if "val" not in splits:
            _give("val", min(draws.values()), draws, splits)
        if TRAIN not in splits:
            _give(TRAIN, max(draws.values()), draws, splits)
    return splits


def _give(split: str, drawn: float, draws: Mapping[int, float], splits: list[str]) -> None:
    """Put an image into a split, with its copies, which have the same draw."""
    for index, own in draws.items():
        if own == drawn:
            splits[index] = split


def check_trainable(splits: Iterable[str]) -> None:
    """Raise where nothing is for training, or nothing is held back to choose the best model with."""
    found = dict.fromkeys(splits)
    missing = next((split for split in (TRAIN, "val") if split not in found), None)
    if missing:
        raise DataError(
            f"The data has nothing to {'train on' if missing == TRAIN else 'choose the best model with'}: "
            f"its images are all for {' and '.join(found) or 'nothing'}.",
            hint='--set data.split_column="", which draws new splits, or name the whole data set, not one part of it',
        )


def _draw(key: str, seed: int) -> float:
    """A number from 0 to 1 that depends on the key and the seed alone."""
    return (
        int.from_bytes(
            hashlib.sha256(f"{seed} {key}".encode("utf-8", "surrogatepass")).digest()[:8]
        )
        / 2**64
    )

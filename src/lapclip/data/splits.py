"""Which images are for training and which are held out: by image, never by caption, and stable as data is added."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lapclip.config import DataConfig
from lapclip.errors import DataError

if TYPE_CHECKING:
    from lapclip.data.table import Row  # which needs `split_named`

HELD_OUT = DataConfig().held_out
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


def assign_splits(rows: Sequence[Row], seed: int, held_out: float = HELD_OUT) -> list[str]:
    """The split of each row: the data's own where it has one, else drawn from the image's name and the seed alone.

    Where the data names splits, images without one are for training. Where it holds nothing back for choosing the
    best model (`val`), those images are drawn from the training images.
    """
    named = {row.split for row in rows} - {""}
    splits = [row.split or TRAIN for row in rows]
    if "val" in named or (named and TRAIN not in splits):
        return splits
    draws = {index: _draw(row.image.name, seed) for index, row in enumerate(rows) if splits[index] == TRAIN}
    for index, drawn in draws.items():
        if drawn < held_out:
            splits[index] = "val"
        elif not named and drawn < 2 * held_out:
            splits[index] = "test"
    # Among very few images chance may leave a split empty that no run can do without.
    in_order = sorted(draws, key=draws.__getitem__)
    if len(in_order) > 1 and "val" not in splits:
        splits[in_order[0]] = "val"
    if len(in_order) > 1 and TRAIN not in splits:
        splits[in_order[-1]] = TRAIN
    return splits


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


def _draw(name: str, seed: int) -> float:
    """A number from 0 to 1 that depends on the image's name and the seed alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64

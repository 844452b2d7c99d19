"""What every tokenizer can do.

A tokenizer has a start and an end token. The end has the highest id, as in CLIP, so that the text tower finds it; what
follows it is padding, which cannot reach it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

LENGTH_STEP = 8
"""Batches are padded to a multiple of this, so that few shapes occur: compilers and MPS memory want them to repeat."""


class Tokenizer(Protocol):
    """Captions to tokens and back."""

    start: int
    end: int
    padding: int

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.end + 1

    def encode(self, caption: str, context: int) -> list[int]:
        """Start, the caption's tokens, end; cut to `context` tokens with the end kept."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The caption of the tokens up to the end, as far as they tell."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from_dict` needs to make the same tokenizer again."""
        ...

    def length(self, caption: str) -> int:
        """The tokens of a caption that is not cut, start and end included."""
        return len(self.encode(caption, sys.maxsize))

    def encode_all(self, captions: Iterable[str], context: int) -> list[np.ndarray]:
        """Every caption by itself, unpadded: for captions that are drawn again and again."""
        return [np.array(self.encode(caption, context), dtype=np.int32) for caption in captions]

    def batch(self, captions: Iterable[str], context: int) -> np.ndarray:
        """Captions as rows, trimmed to the longest of them, rounded up to a multiple of 8, at most `context`."""
        return pad([self.encode(caption, context) for caption in captions], context, self.padding)


def pad(rows: Sequence[Sequence[int] | np.ndarray], context: int, padding: int) -> np.ndarray:
    """Rows of one length: the longest one's, rounded up so that shapes repeat, at most `context`."""
    longest = max(len(row) for row in rows)
    length = min(context, -(-longest // LENGTH_STEP) * LENGTH_STEP)
    padded = np.full((len(rows), length), padding, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded

"""Captions to symbols and back.

A tokenizer has a start, an end and an unknown symbol. The end symbol has the highest id, as in CLIP, so that the text
tower finds it; what follows it is padding, which reuses the start symbol and cannot reach the end symbol.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lapclip.errors import DataError

LENGTH_STEP = 8
"""Batches are padded to a multiple of this, so that few shapes occur: compilers and MPS memory want them to repeat."""


class CharacterTokenizer:
    """One symbol per character, lower-cased."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.start, self.unknown, self.end = len(alphabet), len(alphabet) + 1, len(alphabet) + 2
        self._ids = {character: index for index, character in enumerate(alphabet)}

    @classmethod
    def learn(cls, captions: Iterable[str]) -> CharacterTokenizer:
        """The alphabet of some captions."""
        return cls("".join(sorted({character for caption in captions for character in caption.lower()})))

    @property
    def vocabulary(self) -> int:
        """How many symbols there are."""
        return self.end + 1

    def encode(self, caption: str, context: int) -> list[int]:
        """Start, characters, end; cut to `context` symbols with the end kept."""
        body = [self._ids.get(character, self.unknown) for character in caption.lower()[: context - 2]]
        return [self.start, *body, self.end]

    def decode(self, symbols: Iterable[int]) -> str:
        """The caption of the symbols up to the end; unknown characters come back as a question mark."""
        characters = []
        for symbol in symbols:
            if symbol == self.end:
                break
            if symbol != self.start:
                characters.append(self.alphabet[symbol] if symbol < len(self.alphabet) else "?")
        return "".join(characters)

    def batch(self, captions: Iterable[str], context: int) -> np.ndarray:
        """Captions as rows, trimmed to the longest of them, rounded up to a multiple of 8, at most `context`."""
        return pad([self.encode(caption, context) for caption in captions], context, self.start)

    def to_dict(self) -> dict:
        """What `from_dict` needs to make the same tokenizer again."""
        return {"kind": "characters", "alphabet": self.alphabet}

    @staticmethod
    def from_dict(saved: dict) -> CharacterTokenizer:
        """The tokenizer that was saved."""
        if saved.get("kind") != "characters":
            raise DataError(f"Unknown kind of tokenizer: {saved.get('kind')!r}.", hint="a newer release of lapclip")
        return CharacterTokenizer(saved["alphabet"])


def pad(rows: list[list[int]], context: int, padding: int) -> np.ndarray:
    """Rows of one length: the longest one's, rounded up so that shapes repeat, at most `context`."""
    longest = max(len(row) for row in rows)
    length = min(context, -(-longest // LENGTH_STEP) * LENGTH_STEP)
    padded = np.full((len(rows), length), padding, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded

"""What every tokenizer can do, a tokenizer of characters, and those of pretrained text towers.

A tokenizer has a start and an end token. The end has the highest id, as in CLIP, so that the text tower finds it; what
follows it is padding, which cannot reach it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from lapclip.errors import DataError, first_line

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


class CharacterTokenizer(Tokenizer):
    """One token per character, lower-cased: for few captions, or a small alphabet that is known.
    Characters that were not learnt share one unknown token."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.start, self.unknown, self.end = len(alphabet), len(alphabet) + 1, len(alphabet) + 2
        self.padding = self.start
        self._ids = {character: index for index, character in enumerate(alphabet)}

    @classmethod
    def learn(cls, captions: Iterable[str]) -> CharacterTokenizer:
        """The alphabet of some captions."""
        return cls("".join(sorted({character for caption in captions for character in caption.lower()})))

    def encode(self, caption: str, context: int) -> list[int]:
        body = [self._ids.get(character, self.unknown) for character in caption.lower()[: context - 2]]
        return [self.start, *body, self.end]

    def decode(self, tokens: Iterable[int]) -> str:
        """The caption of the tokens up to the end; unknown characters come back as a question mark."""
        characters = []
        for token in tokens:
            if token == self.end:
                break
            if token != self.start:
                characters.append(self.alphabet[token] if token < len(self.alphabet) else "?")
        return "".join(characters)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "characters", "alphabet": self.alphabet}


class PretrainedTokenizer(Tokenizer):
    """Tokens as a pretrained tower knows them, from its tokenizer.json. Unlike in our own, the end need not have
    the highest id."""

    def __init__(self, description: dict[str, Any], padding: int) -> None:
        # Else the package starts a thread a core and warns when the process is forked later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Reader

        self._description = {**description, "truncation": None, "padding": None}
        try:
            self._reader = Reader.from_str(json.dumps(self._description))
            marks = self._reader.encode("").ids or [padding]
        except Exception as error:  # the package raises nothing more precise
            raise DataError(f"The tokenizer is damaged: {first_line(error)}.") from None
        self.padding = padding
        self.start, self.end = marks[0], marks[-1]

    @property
    def vocabulary(self) -> int:
        return self._reader.get_vocab_size()

    def encode(self, caption: str, context: int) -> list[int]:
        return self._cut(self._reader.encode(caption).ids, context)

    def encode_all(self, captions: Iterable[str], context: int) -> list[np.ndarray]:
        encoded = self._reader.encode_batch(list(captions))
        return [np.array(self._cut(one.ids, context), dtype=np.int32) for one in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._reader.decode(list(tokens), skip_special_tokens=True)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "foreign", "description": self._description, "padding": self.padding}

    def _cut(self, tokens: list[int], context: int) -> list[int]:
        """At most `context` tokens, the last one kept. No caption is empty: something has to be pooled."""
        tokens = tokens or [self.end]
        return tokens if len(tokens) <= context else [*tokens[: context - 1], tokens[-1]]

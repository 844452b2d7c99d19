"""Byte pair encoding as CLIP does it: with CLIP's own published merges, or with merges learnt from the captions.

Words are bytes first, so that no text is unknown: 256 tokens for bytes inside a word and 256 for a word's last byte.
Each merge adds one token; start and end come last.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lapclip.data.tokenizers.clean import END, START, WORDS, WORDS_AND_MARKS, clean
from lapclip.data.tokenizers.tokenizer import Tokenizer

CLIP_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
WORD_END = "</w>"
LEAST = 2 * 256 + 2
"""Tokens before the first merge."""
REMEMBERED = 200_000
"""Words whose tokens are kept: captions say the same words again and again."""


class BytePairTokenizer(Tokenizer):
    """CLIP's BPE where `own` is set, else one with the merges given."""

    padding = 0

    def __init__(self, merges: Sequence[tuple[str, str]], *, own: bool = False) -> None:
        from tokenizers.models import BPE

        self.merges, self.own = merges, own
        letters = list(byte_letters().values())
        ids: dict[str, int] = {}
        for symbol in (*letters, *(letter + WORD_END for letter in letters), *(a + b for a, b in merges)):
            ids.setdefault(symbol, len(ids))  # two merges may make the same token
        self.start, self.end = len(ids), len(ids) + 1
        self.tokens = list(ids)
        self._bpe = BPE(vocab=ids, merges=list(merges), end_of_word_suffix=WORD_END, cache_capacity=0)
        self._pattern = WORDS_AND_MARKS if own else WORDS
        self._marks = {START: (self.start,), END: (self.end,)} if own else {}
        self._known: dict[str, tuple[int, ...]] = dict(self._marks)

    def encode(self, caption: str, context: int) -> list[int]:
        tokens = [self.start]
        for word in self._pattern.findall(clean(caption)):
            tokens += self._known.get(word) or self._word(word)
            if len(tokens) >= context:
                break
        return [*tokens[: context - 1], self.end]

    def decode(self, tokens: Iterable[int]) -> str:
        text = []
        for symbol in tokens:
            if symbol == self.end:
                break
            if symbol != self.start:
                text.append(self.tokens[symbol].replace(WORD_END, " "))
        return b"".join(letter_bytes()[letter] for letter in "".join(text)).decode("utf-8", "replace").strip()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "clip"} if self.own else {"kind": "bpe", "merges": [" ".join(merge) for merge in self.merges]}

    def _word(self, word: str) -> tuple[int, ...]:
        found = tuple(token.id for token in self._bpe.tokenize(spelt(word)))
        if len(self._known) >= REMEMBERED:
            self._known = dict(self._marks)
        self._known[word] = found
        return found


@cache
def byte_letters() -> dict[int, str]:
    """A visible letter for each byte, as GPT-2 and CLIP order them: printable ones first, standing for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@cache
def letter_bytes() -> dict[str, bytes]:
    """The byte of each letter, and a space for a space: that is where decoded words end."""
    return {letter: bytes([byte]) for byte, letter in byte_letters().items()} | {" ": b" "}


def spelt(word: str) -> str:
    """The bytes of a word as letters."""
    letters = byte_letters()
    return "".join([letters[byte] for byte in word.encode("utf-8")])


@cache
def clip_tokenizer() -> BytePairTokenizer:
    """CLIP's own: 49,408 tokens, the same ids as OpenAI's and OpenCLIP's."""
    _, *lines = gzip.decompress(CLIP_MERGES.read_bytes()).decode("utf-8").splitlines()
    return BytePairTokenizer([(first, second) for first, second in map(str.split, lines)], own=True)

"""Byte pair encoding as CLIP does it: with CLIP's own published merges, or with merges learnt from the captions.

Captions are cleaned as CLIP cleans them: mended by ftfy, HTML entities unescaped, one space between words, lower case.
The steps and the pattern of words are those of https://github.com/openai/CLIP, clip/simple_tokenizer.py. `regex` finds
the words, as there: the regular expressions inside the tokenizers package know an older Unicode and cut 17,481
characters differently.
Words are bytes first, so that no text is unknown: 256 tokens for bytes inside a word and 256 for a word's last byte.
Each merge adds one token; start and end come last.
"""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import regex

from lapclip.data.tokenizers.tokenizer import Tokenizer

CLIP_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
WORD_END = "</w>"
LEAST = 2 * 256 + 2
"""Tokens before the first merge."""
REMEMBERED = 200_000
"""Words whose tokens are cached: captions use the same words again and again."""

START, END = "<start_of_text>", "<end_of_text>"
_WORD = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
WORDS = regex.compile(_WORD, regex.IGNORECASE)
WORDS_AND_MARKS = regex.compile(f"{START}|{END}|{_WORD}", regex.IGNORECASE)
"""CLIP's own: the names of its start and end tokens, written in a caption, become those tokens."""

# Printable ASCII without an ampersand. Nothing in it is a control character, a broken encoding, a ligature, a curled
# quote or an HTML entity, so that ftfy and unescaping, which are slow, have nothing to change.
_PLAIN = re.compile(r"[ -%'-~]*")


def clean(caption: str) -> str:
    """A caption as CLIP reads it."""
    if not _PLAIN.fullmatch(caption):
        import ftfy  # here, because most captions do not need it

        caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return " ".join(caption.split()).lower()


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

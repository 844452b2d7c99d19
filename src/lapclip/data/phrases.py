"""Words and phrases cut from captions: what people ask for, where captions are whole sentences.

No list of any language's words is used. A caption is cut at punctuation and at function words, which the captions
themselves show: they stand between ever other neighbours ("a", "in", "and"), which "dog" does not, however common it
is. Every one to three words in a row of what is left are a phrase. Scripts without blanks are cut into characters,
and up to four in a row are a phrase: some are no words, but none that is a word is lost.

Shapes: N images, K phrases, Q phrases that are asked for.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

LONGEST, LONGEST_UNSPACED = 3, 4
"""Words of a phrase; characters, where a script has no blanks."""
SAMPLE = 5000
"""Captions, spread over all, that show the function words: the measure grows with their number."""
VARIETY = 0.6
"""A word is a function word where its neighbours' entropy, left and right, is this share of that of all words. In
English captions "at" has 0.63 and "dog" 0.57."""
RARE = 0.005
"""A function word is in at least this share of the captions."""
COMMON = 0.5
"""A word that is in more of the captions than this is one of a template, such as "photo", and no phrase."""
OPENS = 0.01
"""A function word that opens at least this share of the captions is a determiner: "a", not "in"."""
UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Thai, Lao, Tibetan, Burmese, Khmer, kana and Han."""


@dataclass(frozen=True)
class Phrases:
    """The phrases of some images' captions, the most common first; those equally common in the order of their words."""

    words: list[str]
    """Each phrase, in lower case: "brown dog". Equal phrases are one."""
    texts: list[str]
    """Each as captions mostly have it, with its determiner where they mostly have one: "a brown dog"."""
    lengths_K: np.ndarray
    """How many words each has; of a script without blanks, characters."""
    numbers: np.ndarray
    """The phrases of each image, ascending, one image's after the other's."""
    first_N: np.ndarray
    """Where those of each image begin, and where the last one's end."""

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def images_K(self) -> np.ndarray:
        """How many images have each."""
        return np.bincount(self.numbers, minlength=len(self))

    @cached_property
    def is_word_K(self) -> np.ndarray:
        """Which are single words; of a script without blanks, up to two characters."""
        unspaced = _unspaced()
        longest = np.array(
            [1 + bool(unspaced.match(phrase)) for phrase in self.words], dtype=np.int64
        )
        return self.lengths_K <= longest

    def in_images(self, asked_Q: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Which images have which of some phrases in their captions, (N, Q); of all images, or of some rows."""
        kinds, column_Q = np.unique(asked_Q, return_inverse=True)
        column_K = np.full(len(self), -1)
        column_K[kinds] = np.arange(len(kinds))
        rows = np.arange(len(self.first_N) - 1) if rows is None else rows
        first, counts = self.first_N[rows], self.first_N[rows + 1] - self.first_N[rows]
        ends = np.cumsum(counts)
        found = column_K[
            self.numbers[np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)]
        ]
        has = np.zeros((len(rows), len(kinds)), dtype=bool)
        has[np.repeat(np.arange(len(rows)), counts)[found >= 0], found[found >= 0]] = True
        return has[:, column_Q]


def cut_phrases(captions: Sequence[Sequence[str]], least: int = 1, most: float = COMMON) -> Phrases:
    """The phrases of the captions of each image. Those of fewer than `least` images are left out, and those of more
    than the share `most`, which tell no image from another.

    The same captions always give the same phrases.
    """
    flat = [caption for options in captions for caption in options]
    between, determiners = function_words(flat)
    kinds: dict[str, int] = {}
    lengths: list[int] = []
    forms: Counter[tuple[int, str]] = Counter()
    own: list[np.ndarray] = []
    for options in captions:
        mine: set[int] = set()
        for caption in options:
            for run, determiner in _runs(caption, between):
                for first in range(len(run)):
                    for phrase, length in _from(run, first):
                        number = kinds.setdefault(phrase, len(kinds))
                        if number == len(lengths):
                            lengths.append(length)
                        mine.add(number)
                        if first == 0:  # elsewhere another word takes the determiner's place
                            forms[number, determiner if determiner in determiners else ""] += 1
        own.append(np.fromiter(mine, dtype=np.int32, count=len(mine)))
    return _numbered(list(kinds), lengths, _common_forms(forms), own, least, most)


def function_words(captions: Sequence[str]) -> tuple[set[str], set[str]]:
    """The function words of some captions, and those of them that are determiners."""
    step = max(1, -(-len(captions) // SAMPLE))
    sample = [list(_cut(caption)) for caption in captions[::step]]
    words: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    left: dict[str, Counter[str]] = {}
    right: dict[str, Counter[str]] = {}
    opens: Counter[str] = Counter()
    for pieces in sample:
        words.update(word for piece in pieces for word in piece)
        inside.update({word for piece in pieces for word in piece})
        opens.update(piece[0] for piece in pieces[:1])
        for piece in pieces:
            for before, word, after in zip(["", *piece], piece, [*piece[1:], ""], strict=False):
                left.setdefault(word, Counter())[before] += 1
                right.setdefault(word, Counter())[after] += 1
    whole = 2 * _entropy(words.values())
    found = {
        word
        for word, count in inside.items()
        if count > COMMON * len(sample)
        or (
            count >= max(2, RARE * len(sample))
            and _entropy(left[word].values()) + _entropy(right[word].values()) >= VARIETY * whole
        )
    }
    return found, {word for word in found if opens[word] >= OPENS * len(sample)}


def _entropy(counts: Iterable[int]) -> float:
    every = list(counts)
    total = sum(every)
    return -sum(count / total * math.log(count / total) for count in every)


def _runs(caption: str, between: set[str]) -> Iterator[tuple[list[str], str]]:
    """The words in a row between function words and punctuation, and the function word right before them."""
    for piece in _cut(caption):
        run: list[str] = []
        before = ""
        for word in piece:
            if word not in between:
                run.append(word)
                continue
            if run:
                yield run, before
            run, before = [], word
        if run:
            yield run, before


def _from(run: list[str], first: int) -> Iterator[tuple[str, int]]:
    """The phrases that begin at a word of a run, with how many words each has."""
    unspaced = _unspaced()
    phrase, length = run[first], 1
    yield phrase, 1
    for before, word in zip(run[first:], run[first + 1 :], strict=False):
        blank = not (unspaced.match(before) and unspaced.match(word))
        length += 1
        if length > (LONGEST if blank else LONGEST_UNSPACED):
            return
        phrase += f" {word}" if blank else word
        yield phrase, length


def words(caption: str) -> list[str]:
    """The words of a caption in lower case; scripts without blanks by the character."""
    return [word for piece in _cut(caption) for word in piece]


def _cut(caption: str) -> Iterator[list[str]]:
    """A caption as words in lower case, in pieces between punctuation; as characters, of scripts without blanks."""
    piece: list[str] = []
    last = 0
    text = unicodedata.normalize("NFC", caption).lower()
    for found in (_ASCII if text.isascii() else _any_word()).finditer(text):
        if piece and text[last : found.start()].strip():
            yield piece
            piece = []
        piece.append(found[0])
        last = found.end()
    if piece:
        yield piece


_ASCII = re.compile(r"[a-z0-9]+(?:['-][a-z0-9]+)*")


@cache
def _marks() -> str:
    """Characters that belong to the letter before them, which `re` takes for the end of a word."""
    marks = (
        chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M"
    )
    return "".join(marks) + "\u200c\u200d"


@cache
def _any_word() -> re.Pattern[str]:
    letter = rf"(?:(?![{UNSPACED}_])[\w{_marks()}])"
    return re.compile(rf"[{UNSPACED}][{_marks()}]*|{letter}+(?:['\u2019-]{letter}+)*")


@cache
def _unspaced() -> re.Pattern[str]:
    return re.compile(f"[{UNSPACED}]")


def _common_forms(forms: Counter[tuple[int, str]]) -> dict[int, str]:
    """The determiner that each phrase mostly has; none where it mostly has none."""
    best: dict[int, tuple[int, str]] = {}
    for (number, determiner), count in forms.items():
        if (-count, determiner) < best.get(number, (0, "")):
            best[number] = (-count, determiner)
    return {number: determiner for number, (_, determiner) in best.items()}


def _numbered(
    kinds: list[str],
    lengths: list[int],
    determiners: dict[int, str],
    own: list[np.ndarray],
    least: int,
    most: float,
) -> Phrases:
    """Phrases in their order, without those of too few images and of too many."""
    every = np.concatenate([np.zeros(0, dtype=np.int32), *own])
    images_K = np.bincount(every, minlength=len(kinds))
    kept = np.flatnonzero((images_K >= least) & (images_K <= max(most * len(own), 1))).tolist()
    kept.sort(key=lambda number: (-images_K[number], kinds[number]))
    place_K = np.full(len(kinds), -1)
    place_K[kept] = np.arange(len(kept))
    row, place = np.repeat(np.arange(len(own)), [len(mine) for mine in own]), place_K[every]
    order = np.lexsort((place, row))
    row, place = row[order][place[order] >= 0], place[order][place[order] >= 0]
    texts = []
    for number in kept:
        determiner, phrase = determiners.get(number, ""), kinds[number]
        blank = " " * (not (_unspaced().match(determiner) and _unspaced().match(phrase)))
        texts.append(f"{determiner}{blank}{phrase}" if determiner else phrase)
    return Phrases(
        words=[kinds[number] for number in kept],
        texts=texts,
        lengths_K=np.array([lengths[number] for number in kept], dtype=np.int64),
        numbers=place.astype(np.int64),
        first_N=np.searchsorted(row, np.arange(len(own) + 1)),
    )

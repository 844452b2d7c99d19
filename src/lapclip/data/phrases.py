"""Words and phrases of captions: what people search for if captions are whole sentences.

There is no list of words of any language. A caption is cut at punctuation and at function words
("a", "in", "and"), which the captions themselves reveal: their neighbors vary more than those of a
noun, however common it is. Every one to three consecutive words in between are a phrase. Scripts
without spaces are cut into characters, and up to four consecutive ones are a phrase: some of these
are no words, but no word is lost.

Shapes: N images, K phrases.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from lapclip.data.ragged import Ragged

MAX_WORDS = 3  # of a phrase
MAX_CHARACTERS = 4  # of a phrase in a script without spaces
SAMPLE = 5000  # captions that reveal the function words; entropies grow with their number
# A function word's neighbors have this share of the entropy of all words. In English captions "at"
# has 0.63 and "dog" 0.57.
VARIETY = 0.6
# As shares of the captions:
RARE = 0.005  # a function word is in more
COMMON = 0.5  # a word in more belongs to a template, such as "photo"
OPENS = 0.01  # a function word that opens more is a determiner: "a", not "in"
# Thai, Lao, Tibetan, Burmese, Khmer, kana and Han.
UNSPACED = 3, 4
"""Words of a phrase; characters, where a script has no blanks."""
SAMPLE = 5000
"""Captions, spread over all, that show the function words: the measure grows with their number."""
VARIETY = 0.6
"""A word is a function word where its neighbours' entropy, left and right, is this share of that of
all words. In English captions "at" has 0.63 and "dog" 0.57."""
RARE = 0.005
"""A function word is in at least this share of the captions."""
COMMON = 0.5
"""A word that is in more of the captions than this is one of a template, such as "photo", and no
phrase."""
OPENS = 0.01
"""A function word that opens at least this share of the captions is a determiner: "a", not "in"."""
UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"


class FunctionWords(NamedTuple):
    """The function words of some captions."""

    words: set[str]
    determiners: set[str]
    """Those that open captions."""


class Run(NamedTuple):
    """Consecutive words between function words or punctuation."""

    words: list[str]
    word_before: str
    """The function word right before the run, or an empty text."""


@dataclass(frozen=True)
class Phrases:
    """The phrases of some images, most common first, equally common ones in alphabetical order."""

    words: list[str]
    """Each phrase in lower case, for example "brown dog"."""
    texts: list[str]
    """Each phrase in its most common form, with a determiner or without: "a brown dog"."""
    lengths_K: np.ndarray
    """Number of words of each phrase, or of characters in a script without spaces."""
    numbers: np.ndarray
    """Indices of the phrases of each image, ascending, image after image."""
    first_N: np.ndarray
    """Start of each image in `numbers`, and the end of the last."""

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def images_K(self) -> np.ndarray:
        """Number of images of each phrase."""
        return np.bincount(self.numbers, minlength=len(self))

    @cached_property
    def is_word_K(self) -> np.ndarray:
        """Whether each phrase is a single word: in a script without spaces, up to two
        characters."""
        has_no_spaces = [_unspaced().match(phrase) is not None for phrase in self.words]
        return self.lengths_K <= np.where(has_no_spaces, 2, 1)

    def in_images(self, requested: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Return which images have which of the requested phrases, (images, requested).

        `rows` selects images. Without it all are taken.
        """
        phrases_of_images = Ragged(self.numbers, self.first_N)
        if rows is None:
            rows = np.arange(len(phrases_of_images))
        distinct, column_of_request = np.unique(requested, return_inverse=True)
        column_of_phrase = np.full(len(self), -1)
        column_of_phrase[distinct] = np.arange(len(distinct))
        columns = column_of_phrase[phrases_of_images.joined(rows)]
        images = np.repeat(np.arange(len(rows)), phrases_of_images.lengths(rows))
        is_requested = columns >= 0
        has_phrase = np.zeros((len(rows), len(distinct)), dtype=bool)
        has_phrase[images[is_requested], columns[is_requested]] = True
        return has_phrase[:, column_of_request]


def cut_phrases(captions: Sequence[Sequence[str]], least: int = 1, most: float = COMMON) -> Phrases:
    """Return the phrases in the captions of each image. The same captions give the same phrases.

    Leaves out phrases of fewer than `least` images, and of more than the share `most` of the
    images, which do not distinguish them.
    """
    collector = _PhraseCollector(function_words(list(chain.from_iterable(captions))))
    for captions_of_image in captions:
        collector.add_image(captions_of_image)
    return collector.select(least, most)


class _PhraseCollector:
    """Collects the phrases of captions, image after image."""

    def __init__(self, function_words: FunctionWords) -> None:
        self._function_words = function_words
        self._numbers: dict[str, int] = {}
        """Number of each phrase, in order of appearance."""
        self._lengths: list[int] = []
        self._forms: Counter[tuple[int, str]] = Counter()
        """How often each phrase has each determiner, or none."""
        self._of_images: list[np.ndarray] = []

    def add_image(self, captions: Sequence[str]) -> None:
        numbers: set[int] = set()
        for caption in captions:
            for run in _runs(caption, self._function_words.words):
                numbers |= self._add_run(run)
        self._of_images.append(np.fromiter(numbers, dtype=np.int32, count=len(numbers)))

    def _add_run(self, run: Run) -> set[int]:
        """Add all phrases of a run, and return their numbers."""
        determiner = ""
        if run.word_before in self._function_words.determiners:
            determiner = run.word_before
        numbers: set[int] = set()
        for start in range(len(run.words)):
            for phrase, length in _phrases_from(run.words, start):
                number = self._numbers.setdefault(phrase, len(self._numbers))
                if number == len(self._lengths):  # a new phrase
                    self._lengths.append(length)
                numbers.add(number)
                if start == 0:  # only there a determiner can stand right before the phrase
                    self._forms[number, determiner] += 1
        return numbers

    def select(self, least: int, most: float) -> Phrases:
        """Return the phrases that neither too few nor too many images have, in their order."""
        phrases = list(self._numbers)
        image_count = len(self._of_images)
        of_all_images = np.concatenate([np.zeros(0, dtype=np.int32), *self._of_images])
        counts = np.bincount(of_all_images, minlength=len(phrases))
        is_selected = (counts >= least) & (counts <= max(most * image_count, 1))
        selected = np.flatnonzero(is_selected).tolist()
        selected.sort(key=lambda number: (-counts[number], phrases[number]))

        new_numbers = np.full(len(phrases), -1)
        new_numbers[selected] = np.arange(len(selected))
        images = np.repeat(np.arange(image_count), [len(own) for own in self._of_images])
        numbers = new_numbers[of_all_images]
        order = np.lexsort((numbers, images))  # by image, then by number
        images, numbers = images[order], numbers[order]
        is_left = numbers >= 0

        determiners = self._common_determiners()
        texts = [_join(determiners.get(number, ""), phrases[number]) for number in selected]
        return Phrases(
            words=[phrases[number] for number in selected],
            texts=texts,
            lengths_K=np.array([self._lengths[number] for number in selected], dtype=np.int64),
            numbers=numbers[is_left].astype(np.int64),
            first_N=np.searchsorted(images[is_left], np.arange(image_count + 1)),
        )

    def _common_determiners(self) -> dict[int, str]:
        """Return the most common determiner of each phrase. Empty if it mostly has none."""
        best: dict[int, tuple[int, str]] = {}
        for (number, determiner), count in self._forms.items():
            rank = (-count, determiner)  # the first in alphabetical order of equally common ones
            if number not in best or rank < best[number]:
                best[number] = rank
        return {number: determiner for number, (_, determiner) in best.items()}


def function_words(captions: Sequence[str]) -> FunctionWords:
    """Return the function words of captions. Words of templates count as such."""
    sample = captions[:: max(1, -(-len(captions) // SAMPLE))]
    counts: Counter[str] = Counter()
    caption_counts: Counter[str] = Counter()
    opening_counts: Counter[str] = Counter()
    left: defaultdict[str, Counter[str]] = defaultdict(Counter)
    right: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for caption in sample:
        pieces = list(_cut(caption))
        for piece in pieces:
            counts.update(piece)
            for before, word, after in zip(["", *piece], piece, [*piece[1:], ""], strict=False):
                left[word][before] += 1
                right[word][after] += 1
        caption_counts.update(set(chain.from_iterable(pieces)))
        if pieces:
            opening_counts[pieces[0][0]] += 1
    least_captions = max(2, RARE * len(sample))
    least_entropy = VARIETY * (2 * _entropy(counts.values()))
    words = set()
    for word, count in caption_counts.items():
        if count > COMMON * len(sample):
            words.add(word)
        elif count >= least_captions:
            entropy = _entropy(left[word].values()) + _entropy(right[word].values())
            if entropy >= least_entropy:
                words.add(word)
    determiners = {word for word in words if opening_counts[word] >= OPENS * len(sample)}
    return FunctionWords(words, determiners)


def _entropy(counts: Iterable[int]) -> float:
    counts = list(counts)
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts)


def _runs(caption: str, function_words: set[str]) -> Iterator[Run]:
    """Yield the consecutive words between function words and punctuation."""
    for piece in _cut(caption):
        words: list[str] = []
        word_before = ""
        for word in piece:
            if word not in function_words:
                words.append(word)
                continue
            if words:
                yield Run(words, word_before)
            words, word_before = [], word
        if words:
            yield Run(words, word_before)


def _phrases_from(words: list[str], start: int) -> Iterator[tuple[str, int]]:
    """Yield the phrases that begin at one of consecutive words, with their lengths."""
    phrase, length = words[start], 1
    yield phrase, length
    for before, word in zip(words[start:], words[start + 1 :], strict=False):
        length += 1
        has_space = _has_space(before, word)
        if length > (MAX_WORDS if has_space else MAX_CHARACTERS):
            return
        phrase += f" {word}" if has_space else word
        yield phrase, length


def _has_space(before: str, after: str) -> bool:
    """Return whether there is a space between two words. There is none within some scripts."""
    return not (_unspaced().match(before) and _unspaced().match(after))


def _join(determiner: str, phrase: str) -> str:
    """Return a phrase with its determiner, if it has one."""
    if determiner and _has_space(determiner, phrase):
        return f"{determiner} {phrase}"
    return determiner + phrase


def words(caption: str) -> list[str]:
    """Return the words of a caption in lower case, or its characters in a script without spaces."""
    return list(chain.from_iterable(_cut(caption)))


def _cut(caption: str) -> Iterator[list[str]]:
    """Yield the words of a caption in lower case, in pieces between punctuation."""
    piece: list[str] = []
    end = 0
    text = unicodedata.normalize("NFC", caption).lower()
    pattern = _ASCII if text.isascii() else _any_word()
    for match in pattern.finditer(text):
        if piece and text[end : match.start()].strip():
            yield piece
            piece = []
        piece.append(match[0])
        end = match.end()
    if piece:
        yield piece


_ASCII = re.compile(r"[a-z0-9]+(?:['-][a-z0-9]+)*")


@cache
def _marks() -> str:
    """Return the combining characters, which `re` takes for the end of a word."""
    characters = map(chr, range(0x300, 0x1F000))
    marks = [character for character in characters if unicodedata.category(character)[0] == "M"]
    return "".join(marks) + "\u200c\u200d"


@cache
def _any_word() -> re.Pattern[str]:
    letter = rf"(?:(?![{UNSPACED}_])[\w{_marks()}])"
    return re.compile(rf"[{UNSPACED}][{_marks()}]*|{letter}+(?:['\u2019-]{letter}+)*")


@cache
def _unspaced() -> re.Pattern[str]:
    return re.compile(f"[{UNSPACED}]")

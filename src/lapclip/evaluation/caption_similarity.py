"""How alike captions are, by their words alone: a measure that no model under test has a hand in.

tf-idf: a word counts for more the fewer images have it. Two images are as alike as the directions of their words,
all captions of each taken together: 0 for no word in common, 1 for the same words equally often.

Shapes: N images, V words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

MOST_WORDS = 20_000
"""Words that are kept, the most common: rarer ones are in so few captions that they say little about likeness."""


class Wording:
    """The words of some images."""

    def __init__(self, captions: Sequence[Sequence[str]]) -> None:
        self._words = [Counter(word for caption in options for word in words(caption)) for options in captions]
        images = Counter(word for bag in self._words for word in bag)
        self._index = {word: at for at, (word, _) in enumerate(images.most_common(MOST_WORDS))}
        # Smoothed as in Salton and Buckley 1988: a word that all have still counts a little.
        self._weights = {word: np.log((1 + len(captions)) / (1 + images[word])) + 1 for word in self._index}

    def rows(self, images: Sequence[int] | np.ndarray) -> np.ndarray:
        """The words of some images as unit-length rows."""
        rows_NV = np.zeros((len(images), len(self._index)), dtype=np.float32)
        for row, image in zip(rows_NV, images, strict=True):
            for word, count in self._words[image].items():
                if word in self._index:
                    row[self._index[word]] = count * self._weights[word]
        return rows_NV / np.maximum(np.linalg.norm(rows_NV, axis=1, keepdims=True), 1e-12)


def words(caption: str) -> list[str]:
    """The words of a caption in small letters; scripts without spaces by the character."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_]+(?:['\u2019-][^\W_]+)*", caption.lower())

"""Facts about captions: their scripts, what they cost in tokens, and the best scores that equal ones allow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import regex

from lapclip.data.tokenizers import CharacterTokenizer, Tokenizer, count_words

SCRIPTS = (
    "Latin", "Han", "Hiragana", "Katakana", "Hangul", "Cyrillic", "Arabic", "Hebrew", "Greek", "Devanagari", "Bengali",
    "Tamil", "Telugu", "Thai", "Georgian", "Armenian", "Ethiopic", "Khmer", "Lao", "Myanmar", "Sinhala", "Gujarati",
    "Gurmukhi", "Kannada", "Malayalam", "Tibetan",
)  # fmt: skip
EMOJI = "emoji"


def count_scripts(captions: Sequence[str]) -> dict[str, list[int]]:
    """Which captions use which script, the most used first. A caption may use several."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, caption in enumerate(captions):
        if caption.isascii():
            if any(letter.isalpha() for letter in caption):
                found["Latin"].append(at)
            continue
        for script in (*SCRIPTS, EMOJI):
            if _pattern(script).search(caption):
                found[script].append(at)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def tokens_per_character(script: str, captions: Sequence[str], tokenizer: Tokenizer, most: int = 200) -> float:
    """What a letter of a script costs: tokens by letter, over the letters of that script in some of the captions."""
    letters = " ".join("".join(_runs(script).findall(caption)) for caption in captions[:most])
    count = sum(not letter.isspace() for letter in letters)
    return (tokenizer.length(letters) - 2) / count if count else 0.0


def unknown_characters(captions: Sequence[str], tokenizer: Tokenizer) -> Counter[str]:
    """Characters that the tokenizer cannot express, and how many captions have each. A BPE expresses all."""
    if not isinstance(tokenizer, CharacterTokenizer):
        return Counter()
    known = set(tokenizer.alphabet)
    return Counter(letter for caption in captions for letter in set(caption.lower()) - known)


def ceilings(
    contents: Sequence[Hashable], captions: Sequence[Sequence[str]], tokenizer: Tokenizer, context: int
) -> Any:
    """The best text-to-image and image-to-text R@1 that any model can reach among these images.

    Images with equal contents get the same vector, and so do captions with the same tokens: a search cannot tell
    them apart, and of those that tie only one comes first. `told_apart` is the share of images that have contents and
    a caption of their own.
    """
    rows = [[tuple(tokenizer.encode(caption, context)) for caption in options] for options in captions]
    size = Counter(contents)
    owners: dict[tuple[int, ...], Counter[Hashable]] = defaultdict(Counter)
    for content, options in zip(contents, rows, strict=True):
        for tokens in options:
            owners[tokens][content] += 1
    queries = sum(counts.total() for counts in owners.values())
    # Text to image: a caption's first image can have one content; its copies come first by chance.
    found = sum(max(count / size[content] for content, count in counts.items()) for counts in owners.values())
    # Image to text: images of one content get one first caption, which other images may own as well.
    best: dict[Hashable, float] = defaultdict(float)
    for counts in owners.values():
        for content, count in counts.items():
            best[content] = max(best[content], count / counts.total())
    own = sum(
        size[content] == 1 and any(len(owners[tokens]) == 1 for tokens in options)
        for content, options in zip(contents, rows, strict=True)
    )
    images = max(1, len(contents))
    return {
        "t2i_r1": found / max(1, queries),
        "i2t_r1": sum(best.values()) / images,
        "told_apart": own / images,
    }


def frequent_words(captions: Sequence[str], most: int) -> list[tuple[str, int]]:
    """The most frequent words, without those that are shorter than three letters or carry little."""
    counts = count_words(captions)
    return [(word, count) for word, count in counts.most_common(most + 200) if len(word) > 2 and word not in SMALL][
        :most
    ]


SMALL = {
    "the", "and", "with", "are", "his", "her", "its", "their", "there", "this", "that", "has", "have", "had", "for",
    "from", "into", "onto", "out", "off", "over", "under", "while", "who", "whom", "which", "was", "were", "been",
    "being", "not", "but", "you", "your", "our", "they", "them", "she", "him", "one", "two",
}  # fmt: skip
"""English words that say nothing about images."""


@cache
def _pattern(script: str) -> regex.Pattern[str]:
    return regex.compile(r"\p{Emoji_Presentation}" if script == EMOJI else rf"\p{{Script={script}}}")


@cache
def _runs(script: str) -> regex.Pattern[str]:
    return regex.compile(_pattern(script).pattern + "+")

"""A question bank: what people may ask in general, in whole captions and in short phrases. How close an image comes to
these says how much of its score for any one question is not about that question (`lapclip.evaluation.hubness`).

A run's bank is drawn from the captions that it learns from, and is written into its folder when it begins, so that it
is there when the data is gone. Other models get a bank of lapclip's own: templates over the words in common_words.txt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lapclip.data.phrases import cut_phrases
from lapclip.paths import read_json, write_atomic
from lapclip.seeding import generator

CAPTIONS, PHRASES = 3000, 3000
"""Of a bank at most. Twice as many captions gained nothing on Flickr8k, and each takes time to embed."""
OWN = "lapclip's own"
COMMON_WORDS = Path(__file__).with_name("common_words.txt")
PHRASE_TEMPLATES = (
    "{person}", "a {person} {doing}", "{animal}", "a {quality} {animal}", "{thing}", "a {quality} {thing}", "{food}",
    "{place}", "a {person} and a {animal}", "{animal} {time}", "a {quality} {place}", "{doing}", "{place} {time}",
    "a {person} with a {thing}", "{quality}",
)  # fmt: skip
CAPTION_TEMPLATES = (
    "a {person} in a {quality} shirt is {doing} in front of a {thing}",
    "a {quality} {animal} next to a {quality} {thing}, seen {time}",
    "two people are {doing} with a {thing} near the {place}",
    "a {person} and a {animal} are {doing} at the {place} {time}",
    "a {quality} {thing} stands between a {thing} and a {quality} {thing}",
    "a plate with {food} and {food} on a {quality} table",
    "the {place} with a {quality} {thing}, {time}",
    "a group of people {doing} while a {person} watches",
    "a {person} with a {quality} {thing} is {doing} at the {place}",
    "several {quality} things and a {thing} in the {place}, {time}",
    "a {animal} looks at a {person} who is {doing}",
    "close view of a {quality} {thing} with {food} beside it",
)  # fmt: skip


@dataclass(frozen=True)
class QuestionBank:
    """Questions in general."""

    captions: list[str]
    phrases: list[str]
    origin: str
    """Where they come from, for people."""

    @property
    def short_below(self) -> int:
        """Words below which a question is short: fewer than nine in ten captions have."""
        counts = sorted(count_words(caption) for caption in self.captions)
        return counts[len(counts) // 10] if counts else 0


def count_words(text: str) -> int:
    return len(text.split())


def bank_of(captions: Iterable[Sequence[str]], origin: str = "the captions it learnt from") -> QuestionBank:
    """The bank of a run, from the captions of its training images."""
    drawn = _drawn(list(dict.fromkeys(caption for options in captions for caption in options)), CAPTIONS)
    return QuestionBank(drawn, cut_phrases([[caption] for caption in drawn]).texts[:PHRASES], origin)


def own_bank() -> QuestionBank:
    """The bank for models whose captions are not known."""
    lines = COMMON_WORDS.read_text(encoding="utf-8").splitlines()
    parts = [line.split(":") for line in lines if not line.startswith("#")]
    kinds = {kind: [word.strip() for word in words.split(",")] for kind, words in parts}
    captions, phrases = _filled(CAPTION_TEMPLATES, kinds, CAPTIONS), _filled(PHRASE_TEMPLATES, kinds, PHRASES)
    return QuestionBank(captions, phrases, OWN)


def save_bank(bank: QuestionBank, path: Path) -> None:
    content = {"format": 1, "captions": bank.captions, "phrases": bank.phrases, "origin": bank.origin}
    write_atomic(path, json.dumps(content, ensure_ascii=False))


def read_bank(path: Path) -> QuestionBank | None:
    """The bank that was saved there; None where there is none that can be read."""
    try:
        content = read_json(path)
        captions, phrases = ([str(text) for text in content[name]] for name in ("captions", "phrases"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return QuestionBank(captions[:CAPTIONS], phrases[:PHRASES], str(content.get("origin", "")))


def _drawn(texts: list[str], most: int) -> list[str]:
    """At most so many of them, in their order: the same ones each time."""
    if len(texts) <= most:
        return texts
    rows = generator(0, "question bank").permutation(len(texts))[:most]
    return [texts[row] for row in sorted(rows.tolist())]


def _filled(templates: Sequence[str], kinds: dict[str, list[str]], count: int) -> list[str]:
    """Templates with words in them, no text twice."""
    draw = generator(0, "own question bank")
    found: dict[str, None] = {}
    for _ in range(20 * count):  # a template of few words runs out of new ones
        if len(found) == count:
            break
        text = templates[int(draw.integers(len(templates)))]
        for kind, words in kinds.items():
            while "{" + kind + "}" in text:
                text = text.replace("{" + kind + "}", words[int(draw.integers(len(words)))], 1)
        found[_with_articles(text)] = None
    return list(found)


def _with_articles(text: str) -> str:
    words = text.split(" ")
    return " ".join(
        "an" if word == "a" and after[:1] in "aeiou" and after else word
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )

"""Hubness: some images are close to every question, and stand among the answers where they do not belong.

A question bank is what people may ask in general, in whole captions and in short phrases. How close an image is to
these, the mean of its best scores among the bank, says how much of a hub it is. A share of that is taken from its score
(nearest-neighbour normalisation). The order of answers changes by one subtraction an image. How much is taken is chosen
for each kind of question on held-out pairs, and nothing is taken where they show no gain.

A run's bank is drawn from the captions that it learns from, and is written into its folder when it begins, so that it
is there when the data is gone. Other models get a bank of lapclip's own: templates over the words in common_words.txt.

Shapes: N images, E embedding, M captions, B texts of a bank, Q questions, S shares, K kinds of question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.data.phrases import cut_phrases
from lapclip.data.phrases import words as words_of
from lapclip.evaluation import QUESTIONS, RANKS
from lapclip.evaluation.intervals import percentiles, resamples
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
    """How long a question is; scripts without blanks by the character."""
    return len(words_of(text))


def bank_of(
    captions: Iterable[Sequence[str]], origin: str = "the captions it learnt from"
) -> QuestionBank:
    """The bank of a run, from the captions of its training images."""
    drawn = _drawn(
        list(dict.fromkeys(caption for options in captions for caption in options)), CAPTIONS
    )
    return QuestionBank(
        drawn, cut_phrases([[caption] for caption in drawn]).texts[:PHRASES], origin
    )


def own_bank() -> QuestionBank:
    """The bank for models whose captions are not known."""
    lines = COMMON_WORDS.read_text(encoding="utf-8").splitlines()
    parts = [line.split(":") for line in lines if not line.startswith("#")]
    kinds = {kind: [word.strip() for word in words.split(",")] for kind, words in parts}
    captions, phrases = (
        _filled(CAPTION_TEMPLATES, kinds, CAPTIONS),
        _filled(PHRASE_TEMPLATES, kinds, PHRASES),
    )
    return QuestionBank(captions, phrases, OWN)


def save_bank(bank: QuestionBank, path: Path) -> None:
    content = {
        "format": 1,
        "captions": bank.captions,
        "phrases": bank.phrases,
        "origin": bank.origin,
    }
    write_atomic(path, json.dumps(content, ensure_ascii=False))


def read_bank(path: Path) -> QuestionBank | None:
    """The bank that was saved there; None where there is none that can be read."""
    try:
        content = read_json(path)
        captions, phrases = (
            [str(text) for text in content[name]] for name in ("captions", "phrases")
        )
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


NEAREST = {"whole": 16, "short": 3000}
"""For each kind of question: how many of the best scores among the bank are averaged. Hubs of whole captions are near
to some of them, hubs of short questions to all."""
KINDS = tuple(QUESTIONS)
SHARES = np.round(np.arange(0, 1.01, 0.1), 1)
"""Shares that are tried."""
MOST = 5000
"""Held-out images, and questions, that the choice looks at."""
BLOCK = 2048
"""Images at a time."""


def closeness(image_NE: np.ndarray, bank: dict[str, np.ndarray]) -> np.ndarray:
    """How close each image is to questions of each kind, N by K; 0 where the bank has none of a kind.

    Rows are taken as float16, as an index keeps them, and multiplied in float64: such products and their sums are
    exact, so that equal images get equal numbers wherever they stand.
    """
    import torch

    found_NK = np.zeros((len(image_NE), len(KINDS)), np.float32)
    with torch.inference_mode():
        for column, kind in enumerate(KINDS):
            bank_BE = torch.from_numpy(bank[kind].astype(np.float16)).double()
            if not len(bank_BE):
                continue
            nearest = min(NEAREST[kind], len(bank_BE))
            for at in range(0, len(image_NE), BLOCK):
                rows_bE = torch.from_numpy(np.array(image_NE[at : at + BLOCK], np.float16)).double()
                best_bk = torch.topk(rows_bE @ bank_BE.T, nearest, dim=1).values
                found_NK[at : at + BLOCK, column] = best_bk.mean(dim=1).numpy()
    return found_NK


def t2i_ranks(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray, close_N: np.ndarray
) -> np.ndarray:
    """The rank of each caption's own image, S by M: with each of the shares taken from the scores. Ties count against
    the model."""
    ranks_SM = np.zeros((len(SHARES), len(text_ME)), np.int64)
    for at in range(0, len(text_ME), BLOCK):
        scores_bN, own_b = text_ME[at : at + BLOCK] @ image_NE.T, image_M[at : at + BLOCK]
        for row, share in enumerate(SHARES):
            left_bN = scores_bN - np.float32(share) * close_N
            own_b1 = np.take_along_axis(left_bN, own_b[:, None], 1)
            ranks_SM[row, at : at + BLOCK] = (left_bN >= own_b1).sum(axis=1)
    return ranks_SM


def choose_for_captions(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray, close_N: np.ndarray
) -> dict[str, Any]:
    """The share for whole captions, by the mean reciprocal rank of each one's own image; recall without and with."""
    rows = generator(0, "held-out questions").permutation(len(text_ME))[:MOST]
    kept = np.unique(np.concatenate([image_M[rows], np.arange(len(image_NE))[:MOST]]))
    image_Q = np.searchsorted(kept, image_M[rows])
    ranks_SQ = t2i_ranks(image_NE[kept], text_ME[rows], image_Q, close_N[kept])
    found, row_Q = choose(1 / ranks_SQ, image_Q)
    with_Q = np.take_along_axis(ranks_SQ, row_Q[None], 0)[0]
    for rank in RANKS:
        found[f"t2i_r{rank}"] = float((ranks_SQ[0] <= rank).mean())
        found[f"t2i_r{rank}_with"] = float((with_Q <= rank).mean())
    return found


def choose_for_questions(precision_SQ: np.ndarray, words: int) -> dict[str, Any]:
    """The share for short questions, by the average precision of each with each share. Its mean without and with is
    that of the first questions, which are single words."""
    found, row_Q = choose(precision_SQ, np.arange(precision_SQ.shape[1]))
    with_Q = np.take_along_axis(precision_SQ, row_Q[None], 0)[0]
    return {
        **found,
        "map": float(precision_SQ[0, :words].mean()),
        "map_with": float(with_Q[:words].mean()),
    }


def choose(value_SQ: np.ndarray, group_Q: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """The share with the highest mean value, what it gains, and the row of the share that each question is scored with.

    The groups are halved: each half is scored with the share that the other half chose, so that the gain is one on
    questions that chose nothing. The share in use is the one that all of them choose, and it is used where the gain is
    surely above 0.
    """
    groups, group_Q = np.unique(group_Q, return_inverse=True)
    half_Q = np.isin(group_Q, generator(0, "halves").permutation(len(groups))[: len(groups) // 2])
    row_Q = np.zeros(len(group_Q), np.int64)
    for half in (half_Q, ~half_Q):
        if half.any() and (~half).any():
            row_Q[half] = value_SQ[:, ~half].mean(axis=1).argmax()
    gain_Q = np.take_along_axis(value_SQ, row_Q[None], 0)[0] - value_SQ[0]
    gains = np.bincount(group_Q, weights=gain_Q, minlength=len(groups))
    counts = np.bincount(group_Q, minlength=len(groups)).astype(float)
    drawn = np.concatenate(
        [(weights @ gains) / (weights @ counts) for weights in resamples(len(groups))]
    )
    low, high = percentiles(drawn)
    row = int(value_SQ.mean(axis=1).argmax())
    return {
        "questions": len(group_Q),
        "share": float(SHARES[row]),
        "gain": float(gain_Q.mean()),
        "gain_low": low,
        "gain_high": high,
        "used": bool(low > 0 and row > 0),
    }, row_Q

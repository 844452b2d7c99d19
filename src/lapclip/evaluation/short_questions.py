"""Short questions: a word or a phrase instead of a caption, "a dog" instead of all that is on the photo.

An image is right where one of its captions has the word. That is less than the truth, because a dog that nobody
mentions counts as wrong, so even a perfect model stays below 1.

Average precision is the mean, over the right images, of the share of right ones down to there; its mean over the
questions is what is called mAP. Intervals draw the questions again, not the images: they say how sure the figure is for
other words of this kind.

Shapes: N images, M captions, E embedding, Q questions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.data.phrases import COMMON, Phrases, cut_phrases
from lapclip.data.phrases import words as words_of
from lapclip.evaluation.intervals import bootstrap_interval
from lapclip.evaluation.ranks import BLOCK, exact, grid_scale

MOST = 300
"""Words that are asked, and phrases: the most common."""
LEAST_IMAGES = 5
"""Images that a word must be right for to be asked."""
MIN_QUERIES = 30  # below that there is no figure: a few odd words would decide it
ENGLISH_SHARE = 0.5  # captions are English where this share of them has an English function word
COMMON_IN_OTHER_LANGUAGES = (
    0.1  # share of captions from which on an unknown word counts as a function word
)
FUNCTION_WORDS = Path(__file__).with_name("function_words.txt")
FIRST = 5
"""Answers that a person sees at once."""
SHOWN = 5
"""Questions that are named: those answered best, and worst."""


@dataclass(frozen=True)
class ShortQuestions:
    """Words, the most common first, then phrases of two and three words, the most common first."""

    texts: list[str]
    words: int
    """How many of them are single words."""
    right_QN: np.ndarray
    """Which images are right."""

    def select(self, at: slice) -> ShortQuestions:
        """Some of the questions, as if all were words."""
        return ShortQuestions(self.texts[at], len(self.texts[at]), self.right_QN[at])


def short_questions(captions: Sequence[Sequence[str]]) -> ShortQuestions | None:
    """The questions that the captions of some images answer; None where they are too few. The same captions always
    give the same ones."""
    owner_M = np.repeat(np.arange(len(captions)), [len(options) for options in captions])
    phrases = cut_phrases([[caption] for options in captions for caption in options], most=1.0)
    caption = np.repeat(np.arange(len(owner_M)), np.diff(phrases.first_N))
    in_image = np.unique(phrases.numbers * max(1, len(captions)) + owner_M[caption])
    images_K = np.bincount(in_image // max(1, len(captions)), minlength=len(phrases))
    fits_K = (images_K >= LEAST_IMAGES) & (images_K <= COMMON * len(captions))
    fits_K &= ~has_function_word([caption for options in captions for caption in options], phrases)
    # By images, not by captions: what one image has in all its captions is not more common for that.
    order_K = np.argsort(-images_K, kind="stable")
    kinds = [
        order_K[fits_K[order_K] & kind_K[order_K]][:MOST]
        for kind_K in (phrases.is_word_K, ~phrases.is_word_K)
    ]
    if len(kinds[0]) < MIN_QUERIES:
        return None
    asked_Q = np.concatenate(kinds)
    place_K = np.full(len(phrases), -1)
    place_K[asked_Q] = np.arange(len(asked_Q))
    asked = place_K[phrases.numbers] >= 0
    found, where = place_K[phrases.numbers[asked]], caption[asked]
    right_QN = np.zeros((len(asked_Q), len(captions)), dtype=bool)
    right_QN[found, owner_M[where]] = True
    texts = [phrases.texts[number] for number in asked_Q]
    return ShortQuestions(texts, len(kinds[0]), right_QN)


def evaluate_short_questions(
    image_NE: np.ndarray, text_QE: np.ndarray, questions: ShortQuestions
) -> dict[str, Any]:
    """How well words find their images, and under `phrases` the same of phrases, None where there are too few."""
    words, rest = slice(0, questions.words), slice(questions.words, len(questions.texts))
    enough = len(questions.texts[rest]) >= MIN_QUERIES
    return {
        **_score(image_NE, text_QE[words], questions.select(words)),
        "phrases": _score(image_NE, text_QE[rest], questions.select(rest)) if enough else None,
    }


def note_on_no_questions(images: int) -> str:
    """Why there are no short questions, for a person."""
    if images < 2 * LEAST_IMAGES:
        return f"There are no short questions: {images:,} images are too few to ask for words in general."
    return (
        f"There are no short questions: fewer than {MIN_QUERIES} words, function words aside, are in the captions of "
        f"at least {LEAST_IMAGES} of these {images:,} images and of no more than half."
    )


def has_function_word(captions: Sequence[str], phrases: Phrases) -> np.ndarray:
    """Return which phrases hold a function word, such as "in" or "the", and are no queries for that reason.

    For English there is a list. In captions of other languages, very common words are taken for function words.
    """
    english = function_words()
    vocabularies = [set(words_of(caption)) for caption in captions]
    is_english = sum(
        not english.isdisjoint(words) for words in vocabularies
    ) >= ENGLISH_SHARE * len(captions)
    most = len(captions)
    if not is_english:
        most = COMMON_IN_OTHER_LANGUAGES * len(captions)
    counts = Counter(itertools.chain.from_iterable(vocabularies))
    left_out = english | {word for word, count in counts.items() if count > most}
    return np.array(
        [not left_out.isdisjoint(phrase.split()) for phrase in phrases.words], dtype=bool
    )


@cache
def function_words() -> frozenset[str]:
    """Return the English function words."""
    lines = FUNCTION_WORDS.read_text(encoding="utf-8").splitlines()
    return frozenset(
        word.strip() for line in lines if not line.startswith("#") for word in line.split(",")
    )


def similarities_of(image_NE: np.ndarray, text_QE: np.ndarray) -> np.ndarray:
    """Of each question with each image, (Q, N), without rounding, so that equal embeddings tie."""
    return exact(text_QE, grid_scale(text_QE)) @ exact(image_NE, grid_scale(image_NE)).T


def chance_average_precisions(images: int, right: np.ndarray) -> np.ndarray:
    """Return the expected average precision of images in random order.

    `right` has the number of right images of each query.
    """
    harmonic = (1 / np.arange(1, images + 1)).sum()
    # The k-th of n images is right with r / n, and each of the k - 1 before it then with (r - 1) / (n - 1).
    others = (right - 1) / max(images - 1, 1)
    return (harmonic + others * (images - harmonic)) / images


def _score(image_NE: np.ndarray, text_QE: np.ndarray, questions: ShortQuestions) -> dict[str, Any]:
    scores_QN = similarities_of(image_NE, text_QE)
    right_QN = questions.right_QN
    precision_Q, first_Q = average_precisions(scores_QN, right_QN)
    count, right_Q = right_QN.shape[1], right_QN.sum(axis=1)
    low, high = bootstrap_interval(precision_Q, np.ones(len(precision_Q)))
    best = sorted(range(len(precision_Q)), key=lambda at: (-precision_Q[at], at))
    named = [
        {
            "text": questions.texts[at],
            "images": int(right_Q[at]),
            "average_precision": float(precision_Q[at]),
        }
        for at in best
    ]
    return {
        "questions": len(precision_Q),
        "map": float(precision_Q.mean()),
        "map_low": low,
        "map_high": high,
        "chance": float(chance_average_precisions(count, right_Q).mean()),
        "first_five": float(first_Q.mean()),
        "first_five_chance": float((right_Q / count).mean()),
        "best": named[:SHOWN],
        "worst": named[SHOWN:][-SHOWN:],
    }


def average_precisions(
    scores_QN: np.ndarray, right_QN: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the average precision of each query, and the share of its first five results that is right. A tie counts
    against the model: wrong images come first."""
    precision, first = [], []
    at_once = max(1, BLOCK * BLOCK // max(1, scores_QN.shape[1]))
    places_N = np.arange(1, scores_QN.shape[1] + 1)
    for at in range(0, len(scores_QN), at_once):
        scores_bN, right_bN = scores_QN[at : at + at_once], right_QN[at : at + at_once]
        wrong_first_bN = np.argsort(right_bN, axis=1, kind="stable")
        scores_bN = np.take_along_axis(scores_bN, wrong_first_bN, axis=1)
        order_bN = np.take_along_axis(
            wrong_first_bN, np.argsort(-scores_bN, axis=1, kind="stable"), axis=1
        )
        hits_bN = np.take_along_axis(right_bN, order_bN, axis=1)
        sums_b = (hits_bN * np.cumsum(hits_bN, axis=1) / places_N).sum(axis=1)
        precision.append(sums_b / np.maximum(hits_bN.sum(axis=1), 1))
        first.append(hits_bN[:, :FIRST].mean(axis=1))
    return np.concatenate(precision), np.concatenate(first)

"""Words and phrases as questions: which are asked, what is right, and what chance would give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lapclip.evaluation import short_questions as module
from lapclip.evaluation.short_questions import (
    average_precisions,
    chance_average_precisions,
    evaluate_short_questions,
    short_questions,
)

from .embeddings import unit

THINGS = [f"thing{at}" for at in range(25)]
WHERE = [f"near place{at}" for at in range(10)]


def captions(images: int = 250, each: int = 3) -> list[list[str]]:
    """Each image shows a thing of twenty-five; all captions name it, and each says where that is in its own way."""
    return [
        [f"a {THINGS[at % 25]} {WHERE[(at + number + at // 25) % 10]}." for number in range(each)]
        for at in range(images)
    ]


def test_the_most_common_words_are_asked_and_right_where_a_caption_has_them() -> None:
    questions = short_questions(captions())
    assert questions is not None
    assert {"a thing3", "a thing24"} <= set(questions.texts[: questions.words])
    assert not {"a", "in", "thing3"} & set(questions.texts)
    at = questions.texts.index("a thing3")
    assert np.flatnonzero(questions.right_QN[at]).tolist() == list(range(3, 250, 25))
    assert questions.texts == short_questions(captions()).texts  # pyright: ignore[reportOptionalMemberAccess]


def test_few_images_have_no_short_questions() -> None:
    assert short_questions(captions(10)) is None
    assert short_questions([[]]) is None


NOUNS = (
    "dog", "cat", "horse", "boat", "house", "tree", "river", "car", "girl", "ball", "bridge", "hat", "cake", "sheep",
    "train", "bird", "shirt", "kite", "table", "guitar", "snowman", "tent", "ladder", "fence", "wall", "bench", "swing",
    "lamp", "clock", "piano", "duck", "truck", "flag", "statue",
)  # fmt: skip


def made_captions(
    nouns: Sequence[str], templates: Sequence[str], images: int = 120
) -> list[list[str]]:
    """One caption an image: so few that function words do not show themselves by their neighbors."""
    draw = np.random.default_rng(0)
    captions = []
    for image in range(images):
        first, second = draw.choice(len(nouns), 2, replace=False)
        template = templates[image % len(templates)]
        captions.append([template.format(nouns[first], nouns[second])])
    return captions


def test_function_words_are_no_queries() -> None:
    english = (
        "the {} is in front of the {}", "a {} with a {} on it", "{} and {} at the side", "one of the {} by his {}"
    )  # fmt: skip
    questions = short_questions(made_captions(NOUNS, english, 300))
    assert questions is not None
    asked = {word for text in questions.texts[: questions.words] for word in text.split()[-1:]}
    assert asked <= {*NOUNS, "front", "side"}
    assert not [text for text in questions.texts if " of" in text or text.endswith(" in")]


def test_very_common_words_of_another_language_are_no_queries() -> None:
    german = (
        "der {} ist vor dem {}", "ein {} mit dem {} auf der Wiese", "das {} und der {} bei dem Haus",
        "der {} liegt auf dem {}",
    )  # fmt: skip
    questions = short_questions(made_captions([f"{noun}wort" for noun in NOUNS], german, 300))
    assert questions is not None
    asked = {text.split()[-1] for text in questions.texts[: questions.words]}
    assert not asked & {"der", "dem", "ist", "und", "auf", "mit", "ein", "das", "bei", "vor"}


def test_fewer_than_thirty_content_words_give_no_figure() -> None:
    templates = (
        "the {} is in front of the {}",
        "a {} with a {} on it",
        "some {} near their {} and them",
    )
    few = short_questions(made_captions(NOUNS[:25], templates, 300))
    assert few is None
    assert short_questions(made_captions(NOUNS[:32], templates, 300)) is not None


def test_phrases_are_scored_beside_words() -> None:
    colors = (
        "the red {} in front of the green {}",
        "the blue {} on the white {}",
        "the old {} by the new {}",
    )
    questions = short_questions(made_captions(NOUNS, colors, 600))
    assert questions is not None
    assert {"the red dog", "the green kite"} <= set(questions.texts[questions.words :])
    vectors = unit(np.ones((600, 4))), unit(np.ones((len(questions.texts), 4)))
    found = evaluate_short_questions(*vectors, questions)
    assert found["phrases"]["questions"] == len(questions.texts) - questions.words >= 30


def test_average_precision_is_that_of_plain_loops_and_a_tie_counts_against_the_model(
    monkeypatch,
) -> None:
    draw = np.random.default_rng(0)
    scores, right = draw.integers(0, 6, (20, 40)).astype(float), draw.random((20, 40)) < 0.2
    right[:, 0] = True
    expected = []
    for row, own in zip(scores, right, strict=True):
        hits = [own[at] for at in sorted(range(40), key=lambda at: (-row[at], own[at]))]
        expected.append(np.mean([sum(hits[: at + 1]) / (at + 1) for at in range(40) if hits[at]]))
    for block in (1024, 7):
        monkeypatch.setattr(module, "BLOCK", block)
        assert average_precisions(scores, right)[0] == pytest.approx(expected)


def test_what_chance_gives_is_the_mean_over_random_orders() -> None:
    scores = np.random.default_rng(0).random((20_000, 30))
    right = np.zeros(30, dtype=bool)
    right[[1, 2, 5, 20]] = True
    drawn = average_precisions(scores, np.broadcast_to(right, scores.shape))[0].mean()
    assert chance_average_precisions(30, np.array([4]))[0] == pytest.approx(drawn, abs=0.005)


def test_a_perfect_model_has_one_a_collapsed_one_less_than_chance_and_random_ones_chance() -> None:
    questions = short_questions(captions())
    assert questions is not None
    images = unit(
        np.concatenate([questions.right_QN.T, 0.01 * np.ones((250, 1))], axis=1).astype(float)
    )
    texts = np.concatenate(
        [np.eye(len(questions.texts)), np.zeros((len(questions.texts), 1))], axis=1
    )
    found = evaluate_short_questions(images, texts, questions)
    assert found["map"] == found["first_five"] == 1.0
    assert found["questions"] == questions.words >= 25
    collapsed = evaluate_short_questions(
        np.ones((250, 4)) / 2, np.ones((len(texts), 4)) / 2, questions
    )
    assert collapsed["map"] < collapsed["chance"]
    assert collapsed["first_five"] == 0.0
    draw = np.random.default_rng(0)
    some = evaluate_short_questions(
        unit(draw.normal(size=(250, 8))), unit(draw.normal(size=(len(texts), 8))), questions
    )
    assert some["map_low"] <= some["map"] <= some["map_high"]
    assert some["map"] == pytest.approx(some["chance"], abs=0.03)

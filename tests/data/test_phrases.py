"""Words and phrases cut from captions, in any language."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lapclip.data.phrases import cut_phrases, function_words, words
from lapclip.data.scenes import captions as scene_captions
from lapclip.data.scenes import split_scenes

ENGLISH = {"the": ["a", "the"], "and": ["and", "with", "near"], "in": ["in", "on", "at"]}
GERMAN = {"the": ["ein", "der"], "and": ["und", "mit", "neben"], "in": ["in", "auf", "bei"]}


def sentences(language: dict[str, list[str]], count: int = 2000) -> list[list[str]]:
    """A language of eighty nouns and twenty colours, in which "dog" is very common."""
    draw, nouns, colours = (
        random.Random(0),
        [f"noun{at}" for at in range(80)],
        [f"colour{at}" for at in range(20)],
    )

    def thing(first: bool = False) -> str:
        noun = "dog" if draw.random() < 0.1 else draw.choice(nouns)
        colour = f"{draw.choice(colours)} " if draw.random() < 0.2 else ""
        return (
            f"{draw.choice(language['the'])} {colour}{noun}"
            if first or draw.random() < 0.7
            else noun
        )

    made = [
        f"{thing(True)} {draw.choice(language['and'])} {thing()} {draw.choice(language['in'])} {thing()}."
        for _ in range(count)
    ]
    return [[caption.capitalize() for caption in made[at : at + 2]] for at in range(0, count, 2)]


@pytest.mark.parametrize("language", [ENGLISH, GERMAN])
def test_function_words_are_found_in_the_captions_themselves(language):
    found, determiners = function_words(
        [caption for options in sentences(language) for caption in options]
    )
    assert found == {word for words in language.values() for word in words}
    assert determiners == set(language["the"])


def test_a_phrase_is_one_to_three_words_between_function_words_with_its_determiner():
    captions = [*sentences(ENGLISH), ["A colour1 dog near the noun3, noun4 noun5 noun6 noun7."]]
    phrases = cut_phrases(captions)
    own = {
        phrases.words[number]: phrases.texts[number]
        for number in phrases.numbers[phrases.first_N[-2] :].tolist()
    }
    assert {
        "dog",
        "colour1",
        "colour1 dog",
        "noun3",
        "noun4 noun5 noun6",
        "noun5 noun6 noun7",
        "noun7",
    } <= set(own)
    assert not {"a", "near", "noun3 noun4", "noun4 noun5 noun6 noun7"} & set(own)
    assert own["colour1 dog"] in ("a colour1 dog", "the colour1 dog")
    assert own["noun5 noun6"] == "noun5 noun6"
    assert max(phrases.lengths_K) == 3


def test_equal_phrases_are_one_and_know_their_images():
    phrases = cut_phrases([["A Dog."], ["a cat, a dog"], ["a cat"], ["a cow"], ["a hen"]])
    assert phrases.words == ["cat", "dog", "cow", "hen"]
    assert list(phrases.images_K) == [2, 2, 1, 1]
    assert np.array_equal(phrases.in_images(np.array([1, 3]))[:2], [[True, False], [True, False]])
    assert cut_phrases(
        [["A Dog."], ["a cat, a dog"], ["a cat"], ["a cow"], ["a hen"]], least=2
    ).words == ["cat", "dog"]


def test_a_template_gives_its_classes_alone():
    assert cut_phrases([[f"a photo of a {name}."] for name in ("cat", "dog", "cow")]).texts == [
        "a cat",
        "a cow",
        "a dog",
    ]


def test_scripts_without_blanks_are_cut_into_characters_and_marks_stay_with_their_letters():
    found = cut_phrases(
        [["棕色的狗在草地上奔跑。"], ["男人骑自行车"], ["हिन्दी कुत्ता"], ["crème brûlée"]]
    ).words
    assert {"狗", "自行车", "奔跑", "हिन्दी", "कुत्ता", "हिन्दी कुत्ता", "crème brûlée"} <= set(found)
    assert not {"奔跑男人", "上奔跑。"} & set(found)


def test_words_are_found_in_many_scripts() -> None:
    assert words("A man's T-shirt, 2 dogs; été") == ["a", "man's", "t-shirt", "2", "dogs", "été"]
    assert words("一只猫 the cat") == ["一", "只", "猫", "the", "cat"]
    assert words("...") == []


def test_captions_without_words_have_no_phrases():
    assert [len(cut_phrases(captions)) for captions in ([], [[]], [["..."], ["!"]])] == [0, 0, 0]


def test_drawn_scenes_have_phrases_with_a_colour_and_a_thing():
    scenes = split_scenes(300, seed=0)["train"]
    draw = random.Random(0)
    phrases = cut_phrases([scene_captions(scene, 2, draw) for scene in scenes])
    assert {"red", "snails", "red snails"} <= set(phrases.words)
    assert not {"a", "a red"} & set(phrases.words)

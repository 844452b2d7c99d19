from __future__ import annotations

import pytest

from lapclip.data.check_data import (
    ceilings,
    count_scripts,
    tokens_per_character,
    unknown_characters,
)
from lapclip.data.tokenizers import CharacterTokenizer, clip_tokenizer

CLIP = clip_tokenizer()


@pytest.mark.parametrize(
    ("looks", "captions", "text_to_image", "image_to_text", "told_apart"),
    [
        ("ab", [["a dog"], ["a cat"]], 1.0, 1.0, 1.0),
        ("aa", [["a dog"], ["a cat"]], 0.5, 0.5, 0.0),
        ("ab", [["a dog"], ["a dog"]], 0.5, 0.5, 0.0),
        ("ab", [["A  Dog"], ["a dog"]], 0.5, 0.5, 0.0),
        ("ab", [["a dog", "a black dog"], ["a dog", "a white dog"]], 0.75, 1.0, 1.0),
        ("aab", [["a dog"], ["a dog"], ["a dog"]], 1 / 3, 1.0 / 3, 0.0),
    ],
)
def test_copies_and_equal_captions_limit_recall(
    looks: str,
    captions: list[list[str]],
    text_to_image: float,
    image_to_text: float,
    told_apart: float,
) -> None:
    found = ceilings(list(looks), captions, CLIP, 77)
    assert found == pytest.approx(
        {"t2i_r1": text_to_image, "i2t_r1": image_to_text, "told_apart": told_apart}
    )


def test_captions_that_are_cut_to_the_same_tokens_cannot_be_told_apart() -> None:
    captions = [["a dog on the left"], ["a dog on the right"]]
    assert ceilings("ab", captions, CLIP, 77)["t2i_r1"] == 1
    assert ceilings("ab", captions, CLIP, 5)["t2i_r1"] == 0.5


def test_scripts_are_counted_by_caption() -> None:
    found = count_scripts(["a dog", "un café", "一只狗 dog", "собака", "123", "\U0001f600 smile"])
    assert found == {"Latin": [0, 1, 2, 5], "Han": [2], "Cyrillic": [3], "emoji": [5]}


def test_clip_needs_more_tokens_for_chinese_than_for_english() -> None:
    english, chinese = "a red bicycle stands in the snow", "一只红色的自行车停在雪地里"
    assert tokens_per_character("Latin", [english], CLIP) < 0.5
    assert tokens_per_character("Han", [chinese], CLIP) > 1.5


def test_only_characters_can_be_unknown() -> None:
    assert unknown_characters(["a dög", "ö"], CharacterTokenizer("adg ")) == {"ö": 2}
    assert unknown_characters(["a dög"], CLIP) == {}

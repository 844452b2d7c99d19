from __future__ import annotations

import pytest

from lapclip.data.check_data import (
    ceilings,
    count_latin,
    unknown_characters,
)
from lapclip.data.find_images import is_file_name
from lapclip.data.tokenizers import CharacterTokenizer, clip_tokenizer

CLIP = clip_tokenizer()


@pytest.mark.parametrize(
    ("looks", "captions", "text_to_image", "image_to_text"),
    [
        ("ab", [["a dog"], ["a cat"]], 1.0, 1.0),
        ("aa", [["a dog"], ["a cat"]], 0.5, 0.5),
        ("ab", [["a dog"], ["a dog"]], 0.5, 0.5),
        ("ab", [["A  Dog"], ["a dog"]], 0.5, 0.5),
        ("ab", [["a dog", "a black dog"], ["a dog", "a white dog"]], 0.75, 1.0),
        ("aab", [["a dog"], ["a dog"], ["a dog"]], 1 / 3, 1.0 / 3),
    ],
)
def test_copies_and_equal_captions_limit_recall(
    looks: str,
    captions: list[list[str]],
    text_to_image: float,
    image_to_text: float,
) -> None:
    found = ceilings(list(looks), captions, CLIP, 77)
    assert found == pytest.approx({"t2i_r1": text_to_image, "i2t_r1": image_to_text})


def test_captions_that_are_cut_to_the_same_tokens_cannot_be_told_apart() -> None:
    captions = [["a dog on the left"], ["a dog on the right"]]
    assert ceilings("ab", captions, CLIP, 77)["t2i_r1"] == 1
    assert ceilings("ab", captions, CLIP, 5)["t2i_r1"] == 0.5


def test_captions_with_latin_letters_are_counted() -> None:
    assert count_latin(["a dog", "un café", "一只狗 dog", "собака", "123", "\U0001f600 smile"]) == 4


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("IMG_0001.jpg", True),
        ("holiday/a dog.PNG", True),
        ("DSC00012", True),
        ("a dog", False),
        ("an A380 over Rome", False),
        ("20240117", False),
    ],
)
def test_file_names_are_told_from_captions(caption: str, expected: bool) -> None:
    assert is_file_name(caption) == expected


def test_only_characters_can_be_unknown() -> None:
    assert unknown_characters(["a dög", "ö"], CharacterTokenizer("adg ")) == {"ö": 2}
    assert unknown_characters(["a dög"], CLIP) == {}

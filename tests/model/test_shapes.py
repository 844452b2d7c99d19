from __future__ import annotations

import dataclasses

import pytest
import torch

from lapclip.errors import ConfigError
from lapclip.model.clip import CLIP, MAX_LOGIT_SCALE, START_LOGIT_SCALE, count_parameters
from lapclip.model.shapes import SHAPES, named_shape


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("seed", 76_735_489),
        ("seed-as-written", 105_426_433),
        ("vit-b-32", 151_277_313),
        ("vit-b-16", 149_620_737),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count_parameters(CLIP(named_shape(name))) == parameters


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean vit-b-32"):
        named_shape("vit-b32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 7}, r"model\.patch 7 does not divide model\.image_size 32"),
        ({"text_heads": 5}, r"model\.text_heads 5 does not divide model\.text_width 64"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SHAPES["tiny"], **changes)


def test_any_shape_can_be_built() -> None:
    shape = dataclasses.replace(
        SHAPES["tiny"],
        image_size=30,
        patch=10,
        image_width=48,
        image_heads=3,
        text_width=20,
        text_heads=5,
        embedding=7,
    )
    clip = CLIP(shape)
    image = clip.encode_image(torch.randn(2, 3, 30, 30))
    text = clip.encode_text(torch.tensor([[30, 4, 32], [30, 32, 30]]))
    assert image.shape == text.shape == (2, 7)
    torch.testing.assert_close(image.norm(dim=1), torch.ones(2))


def test_weights_depend_on_the_seed_alone() -> None:
    one, same, other = (CLIP(SHAPES["tiny"], seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(
        one.text.get_parameter("projection"), other.text.get_parameter("projection")
    )


def test_logit_scale_starts_at_ln_one_over_007_and_is_held_at_ln_100() -> None:
    clip = CLIP(SHAPES["tiny"])
    assert clip.logit_scale.item() == pytest.approx(START_LOGIT_SCALE)
    clip.logit_scale.data.fill_(9.0)
    clip.hold_temperature()
    assert clip.logit_scale.item() == pytest.approx(MAX_LOGIT_SCALE)


def test_the_end_token_sees_nothing_after_it() -> None:
    clip = CLIP(SHAPES["tiny"])
    padded = torch.tensor([[30, 5, 6, 32, 30, 30, 30, 30]])
    other_padding = torch.tensor([[30, 5, 6, 32, 1, 2, 3, 4]])
    torch.testing.assert_close(clip.encode_text(padded), clip.encode_text(other_padding))

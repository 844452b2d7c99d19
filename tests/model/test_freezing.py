from __future__ import annotations

import pytest

from lapclip.config import TrainConfig
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.freezing import boundary, freeze, load_trainable_state, trainable_state
from lapclip.model.shapes import SHAPES
from lapclip.training.optimizer import make_optimizer, rate_shares


def model_with(**settings) -> tuple[CLIP, TrainConfig]:
    model, config = CLIP(SHAPES["tiny"], seed=1), TrainConfig(**settings)
    freeze(model, config)
    return model, config


@pytest.mark.parametrize(("blocks", "first"), [("all", 0), (2, 0), (1, 1), (0, 2), (9, 0)])
def test_the_last_blocks_learn_and_what_is_before_them_does_not(
    blocks: int | str, first: int
) -> None:
    model, _ = model_with(image_blocks=blocks)
    assert boundary(model, "image") == first
    assert boundary(model, "text") == 0
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ("image.patch_weight" in learns) == (blocks == "all")
    assert ("image.transformer.blocks.0.mlp_in.weight" in learns) == (first == 0)
    assert ("image.transformer.blocks.1.mlp_in.weight" in learns) == (first <= 1)
    assert {
        "image.projection",
        "image.ln_post.weight",
        "text.token_embedding.weight",
        "logit_scale",
    } <= learns


def test_rates_fall_from_the_head_down() -> None:
    model, config = model_with(layer_decay=0.5, tower_share=0.1)
    shares = rate_shares(model, config)
    assert shares["image.projection"] == shares["logit_scale"] == 1
    assert shares["image.transformer.blocks.1.mlp_in.weight"] == pytest.approx(0.1 * 0.5)
    assert shares["image.transformer.blocks.0.mlp_in.weight"] == pytest.approx(0.1 * 0.25)
    assert shares["text.token_embedding.weight"] == pytest.approx(0.1 * 0.125)


def test_the_optimiser_has_what_learns_and_nothing_else() -> None:
    model, config = model_with(image_blocks=0, text_blocks=1)
    groups = make_optimizer(model, config, Cpu()).param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in trainable_state(model).values()}


def test_a_state_of_another_model_is_refused() -> None:
    heads, _ = model_with(image_blocks=0, text_blocks=0)
    whole, _ = model_with()
    with pytest.raises(ValueError, match="it holds other tensors than the model learns: image"):
        load_trainable_state(heads, trainable_state(whole))

from __future__ import annotations

import dataclasses

import pytest

from lapclip.config import TrainConfig, build_config, parse_settings
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.optimizer import image_side, is_cheap, learning_rate, make_optimizer, patches_seen


def test_only_weight_matrices_decay() -> None:
    model = CLIP(SHAPES["tiny"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = make_optimizer(model, TrainConfig(weight_decay=0.3), Cpu()).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    for name in names.values():
        without = "ln_" in name or "bias" in name or "position" in name or "class_" in name or name == "logit_scale"
        assert (name in spared_names) == without, name


def test_learning_rate_rises_then_falls_along_a_cosine() -> None:
    config = TrainConfig(learning_rate=1.0, warmup=0.2)
    rates = [learning_rate(step, 100, config) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.05)
    assert rates[19] == rates[20] == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert 0 < rates[-1] < 0.001


@pytest.mark.parametrize("warmup", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_learning_rate_of_the_shortest_runs_is_a_rate(warmup: float, steps: int) -> None:
    config = TrainConfig(learning_rate=1.0, warmup=warmup)
    assert all(0 <= learning_rate(step, steps, config) <= 1 for step in range(1, steps + 1))


MINI = SHAPES["mini"]


def kinds(config: TrainConfig, *steps: int) -> list[tuple[int, tuple[int, int]]]:
    cheap = [is_cheap(step, config.steps, config) for step in steps]
    return [(image_side(each, config, MINI), patches_seen(each, config, MINI)) for each in cheap]


def test_images_are_small_in_the_cheap_part_and_full_after_it() -> None:
    config = TrainConfig(steps=100, cheap_size=32, cheap_share=0.4)
    assert kinds(config, 1, 40, 41, 100) == [(32, (4, 4)), (32, (4, 4)), (64, (16, 16)), (64, (16, 16))]


def test_patches_are_left_out_in_the_cheap_part_only() -> None:
    config = TrainConfig(steps=100, patch_dropout=0.5, cheap_share=0.4)
    assert kinds(config, 40, 41) == [(64, (8, 16)), (64, (16, 16))]
    assert kinds(dataclasses.replace(config, cheap_size=32), 40, 41) == [(32, (2, 4)), (64, (16, 16))]


def test_without_cheap_settings_there_is_no_cheap_part_to_see() -> None:
    assert kinds(TrainConfig(steps=100), 1, 100) == [(64, (16, 16)), (64, (16, 16))]


@pytest.mark.parametrize("size", [20, 80])
def test_a_cheap_size_has_to_fit_the_patches(size: int) -> None:
    with pytest.raises(ConfigError, match=r"train.cheap_size .* must be a multiple of model.patch 16") as error:
        build_config([parse_settings([f"cheap_size={size}"])], SHAPES)
    assert "train.cheap_size=32" in str(error.value.hint)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lapclip.config import TrainConfig, build_config, parse_settings
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.optimizer import Muon, make_optimizer, orthogonal
from lapclip.training.schedule import image_side, learning_rate
from lapclip.training.step import TrainStep


def test_only_weight_matrices_decay() -> None:
    model = CLIP(SHAPES["tiny"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = make_optimizer(model, TrainConfig(weight_decay=0.3), Cpu()).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    for name in names.values():
        without = (
            "ln_" in name
            or "bias" in name
            or "position" in name
            or "class_" in name
            or name == "logit_scale"
        )
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


def test_images_are_small_in_the_cheap_part_and_full_after_it() -> None:
    config = TrainConfig(steps=100, cheap_size=32, cheap_share=0.4)
    sides = [image_side(step, config, SHAPES["mini"]) for step in (1, 40, 41, 100)]
    assert sides == [32, 32, 64, 64]
    assert image_side(1, TrainConfig(steps=100), SHAPES["mini"]) == 64


@pytest.mark.parametrize("size", [20, 80])
def test_a_cheap_size_has_to_fit_the_patches(size: int) -> None:
    with pytest.raises(
        ConfigError, match=r"train.cheap_size .* must be a multiple of model.patch 16"
    ) as error:
        build_config([parse_settings([f"cheap_size={size}"])], SHAPES)
    assert "train.cheap_size=32" in str(error.value.hint)


@pytest.mark.parametrize("size", [(3, 40, 90), (2, 90, 40)])
def test_directions_of_muon_have_singular_values_near_one(size: tuple[int, ...]) -> None:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0)) ** 3
    found = torch.linalg.svdvals(orthogonal(drawn))
    assert found.min() > 0.5
    assert found.max() < 1.3
    assert torch.linalg.svdvals(drawn / drawn.norm(dim=(1, 2), keepdim=True)).min() < 0.1  # before
    assert ((orthogonal(drawn) * drawn).sum(dim=(1, 2)) > 0).all()


def test_muon_turns_the_matrices_of_blocks_and_leaves_the_rest_to_adamw() -> None:
    shape = replace(SHAPES["photos"], image_width=8, image_size=32, text_width=32, vocabulary=40)
    model = CLIP(shape)
    config = TrainConfig(optimizer="muon", matrix_rate=0.1, learning_rate=1e-3, weight_decay=0.5)
    optimizer = make_optimizer(model, config, Cpu())
    assert isinstance(optimizer, Muon)
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    turned = {
        names[parameter]
        for group in optimizer.param_groups
        if group["muon"]
        for parameter in group["params"]
    }
    assert {
        "image.stem.1.weight",
        "image.blocks.0.first.weight",
        "text.transformer.blocks.1.mlp_in.weight",
    } <= turned
    assert not turned & {
        "image.stem.0.weight",
        "image.projection",
        "text.token_embedding",
        "logit_scale",
    }
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * group["share"]
    optimizer.step()
    for parameter, name in names.items():
        assert not torch.equal(parameter, before[name]), name
        if name in turned and parameter.ndim == 4:
            assert parameter.norm().item() == pytest.approx(len(parameter) ** 0.5, rel=1e-4)
            moved = (
                parameter - before[name] * (len(parameter) ** 0.5 / before[name].norm())
            ).norm()
            assert moved.item() == pytest.approx(
                0.1 * min(parameter.flatten(1).shape) ** 0.5, rel=0.3
            )
    kinds = {names[parameter]: set(state) for parameter, state in optimizer.state.items()}
    assert all((kinds[name] == {"momentum"}) == (name in turned) for name in kinds)


def test_groups_of_a_recorded_step_have_rates_of_their_own() -> None:
    """A recorded step reads its rates from memory; one tensor for all groups would hold the rate of the last."""
    shape = replace(SHAPES["photos"], image_width=8, image_size=32, text_width=32, vocabulary=40)
    config = TrainConfig(
        optimizer="muon",
        matrix_rate=0.1,
        learning_rate=1e-3,
        layer_decay=0.5,
        compile="graph",
        dtype="float32",
    )
    model = CLIP(shape)
    step = TrainStep(model, make_optimizer(model, config, Cpu()), config, Cpu())
    step.set_learning_rate(1e-3)
    groups = step.optimizer.param_groups
    assert len({group["share"] for group in groups}) > 4
    assert [float(group["lr"]) for group in groups] == pytest.approx(
        [1e-3 * group["share"] for group in groups]
    )

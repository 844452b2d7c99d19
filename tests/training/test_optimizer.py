from __future__ import annotations

import pytest

from lapclip.config import TrainConfig
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.optimizer import make_optimizer
from lapclip.training.schedule import learning_rate


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

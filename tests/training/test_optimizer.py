from __future__ import annotations

from lapclip.config import TrainConfig
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.optimizer import make_optimizer


def test_only_weight_matrices_decay() -> None:
    model = CLIP(SHAPES["tiny"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = make_optimizer(model, TrainConfig(weight_decay=0.3), Cpu()).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    for name in names.values():
        without = "ln_" in name or "bias" in name or "position" in name or "class_" in name or name == "logit_scale"
        assert (name in spared_names) == without, name

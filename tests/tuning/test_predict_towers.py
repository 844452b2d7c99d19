from __future__ import annotations

import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.machine.choose_device import pair_of
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
from lapclip.training.two_devices import SplitStep
from lapclip.tuning.flops import larger_share, operations, step_products, tower_products
from lapclip.tuning.predict_towers import predict_step, predicted_from

from .made import batch_of


def test_a_step_takes_the_longer_of_both_in_each_stretch_and_what_is_between_them() -> None:
    parts = {
        "transfer": 1.0, "exchange": 2.0, "image forward": 10.0, "image backward": 20.0, "image update": 1.0,
        "text forward": 30.0, "text backward": 15.0, "text update": 4.0, "forward at once": 27.0,
    }  # fmt: skip
    predicted = predicted_from(
        [parts, {name: seconds * 2 for name, seconds in parts.items()}, parts]
    )
    assert predicted.seconds == 1.0 + 2.0 + 30.0 + 20.0 + 4.0
    assert predicted.waits == "image"
    assert "text 49000.0 ms on cpu" in predicted.text(Cpu())
    slowed = predicted_from([parts | {"forward at once": 45.0}])
    assert slowed.seconds == 1.0 + 2.0 + 1.5 * (30.0 + 20.0 + 4.0)


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16", "micro_batch": 3}], ids=str)
def test_each_tower_is_timed_alone_and_no_weight_changes(settings: dict) -> None:
    pair = pair_of(Cpu(), Cpu())
    config = TrainConfig(batch_size=8, steps=10, **{"dtype": "float32", **settings})
    step = make_step(CLIP(SHAPES["tiny"], seed=1).place(pair), config, pair)
    assert isinstance(step, SplitStep)
    before = [parameter.clone() for parameter in step.model.parameters()]
    predicted = predict_step(step, batch_of(), rounds=2)
    assert all(
        own.forward > 0 and own.backward > 0 and own.update > 0 for own in predicted.towers.values()
    )
    assert (
        predicted.seconds
        < sum(own.total for own in predicted.towers.values()) + predicted.exchange + 1
    )
    for parameter, old in zip(step.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_the_work_of_both_towers_is_the_work_of_a_step() -> None:
    for name in ("seed", "photos", "siglip-base-patch16-224"):
        towers = tower_products(SHAPES[name], 12, 32)
        assert sum(map(operations, towers.values())) == operations(
            step_products(SHAPES[name], 12, 32)
        )
    assert larger_share(SHAPES["seed"], 12, 32) == ("image", pytest.approx(0.86, abs=0.03))

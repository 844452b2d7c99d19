from __future__ import annotations

import pytest
import torch
from torch import nn

from lapclip.config import TrainConfig
from lapclip.machine.choose_device import prepare_device
from lapclip.machine.cpu import Cpu
from lapclip.machine.timing import Stopwatch
from lapclip.model.block import Block, Linear
from lapclip.model.clip import CLIP
from lapclip.model.float8 import ACTIVATIONS, E4M3, GRADIENTS, Float8
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step

from ..tuning.made import batch_of

OFF = Stopwatch(lambda: None, on=False)


@pytest.fixture
def layer() -> Linear:
    torch.manual_seed(1)
    return Linear(64, 128).to(torch.bfloat16)


def passes(layer: Linear, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the input, the weight and the bias, for gradients of a usual size."""
    x = x.to(layer.weight.dtype).requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.linspace(-1e-5, 1e-5, y.numel()).view_as(y).to(y.dtype))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def is_float8(layer: nn.Module) -> bool:
    return getattr(layer, "float8", None) is not None


def differences(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [
        ((one.double() - other.double()).norm() / other.double().norm()).item()
        for one, other in zip(found, right, strict=True)
    ]


def test_the_second_pass_is_in_float8_and_near_the_first(layer: Linear) -> None:
    x = torch.randn(5, 7, 64) * 30
    exact = Linear(64, 128)
    exact.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    right = passes(exact, x.to(torch.bfloat16).float())
    float8 = Float8(nn.Sequential(layer))
    float8.refresh()
    first = passes(layer, x)
    assert max(differences(first, right)) < 0.01
    float8.refresh()
    y, grad_x, grad_weight, grad_bias = differences(passes(layer, x), right)
    assert 0.01 < y < 0.05  # rounded to three bits, twice
    assert 0.01 < grad_x < 0.08  # to two and three bits
    assert grad_weight < 0.01
    assert grad_bias < 0.01


def test_a_scale_follows_the_largest_number_and_forgets_it_slowly(layer: Linear) -> None:
    float8 = Float8(nn.Sequential(layer))
    (own,) = float8._of
    for size in (3.0, 300.0, 3.0):
        float8.refresh()
        passes(layer, torch.full((4, 64), size))
    float8.refresh()
    assert own.scale[ACTIVATIONS] == pytest.approx(448 / 2 / (300 * 0.95), rel=0.01)
    assert own.ready == [True, True]
    for _ in range(200):
        float8.refresh()
        passes(layer, torch.full((4, 64), 3.0))
    float8.refresh()
    assert own.scale[ACTIVATIONS] == pytest.approx(448 / 2 / 3, rel=0.01)
    assert own.scale[GRADIENTS] == pytest.approx(57344 / 2 / 1e-5, rel=0.02)


def test_what_is_too_large_is_cut_off_and_never_infinite(layer: Linear) -> None:
    float8 = Float8(nn.Sequential(layer))
    float8.refresh()
    passes(layer, torch.ones(4, 64))
    float8.refresh()
    found = passes(layer, torch.full((4, 64), 1000.0))
    assert all(tensor.isfinite().all() for tensor in found)


def test_weights_are_rounded_by_their_own_largest_number(layer: Linear) -> None:
    float8 = Float8(nn.Sequential(layer))
    with torch.no_grad():
        layer.weight.mul_(100)
    float8.refresh()
    (own,) = float8._of
    assert own.weight_OI.float().abs().max() == torch.finfo(E4M3).max
    assert torch.equal(own.weight_OI.float().T, own.weight_IO.float())


def test_layers_of_odd_sizes_and_heads_stay_as_they_are() -> None:
    model = nn.ModuleList([Linear(24, 32), Linear(32, 32), nn.Linear(32, 32)])
    Float8(model)
    assert list(map(is_float8, model)) == [False, True, False]
    block = Block(32, 2, causal=False)
    Float8(block)
    assert len({layer.float8 for layer in block.modules() if isinstance(layer, Linear)}) == 4


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 3}, {"recompute": True}], ids=str)
def test_steps_in_float8_learn_what_steps_in_bfloat16_learn(changes: dict) -> None:
    device = Cpu()
    prepare_device(device, 1)
    found = {}
    for dtype in ("bfloat16", "float8"):
        config = TrainConfig(
            batch_size=8, steps=20, dtype=dtype, compile="none", learning_rate=1e-3, **changes
        )
        step = make_step(CLIP(SHAPES["tiny"], seed=1).place(device), config, device)
        assert any(map(is_float8, step.worker.modules())) == (dtype == "float8")
        assert not any(map(is_float8, step.model.modules()))  # what is evaluated and saved
        found[dtype] = [step(batch_of(), number + 1, 1e-3, OFF)().loss for number in range(20)]
    assert found["float8"][0] == found["bfloat16"][0]  # nothing is known before the first
    assert found["float8"][1] != found["bfloat16"][1]
    assert found["float8"] == pytest.approx(found["bfloat16"], abs=0.05)
    assert found["float8"][-1] < 0.7 * found["float8"][0]

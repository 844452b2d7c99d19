"""A setting counts only where it computes what float32 on the CPU computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lapclip.machine.cpu import Cpu
from lapclip.model import kernels
from lapclip.model.shapes import SHAPES
from lapclip.tuning.measure import Rehearsal, Setting, Workshop, make_workload, some_pairs

from .made import CONFIG, batch_of, small


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_right_settings_agree(dtype: str, micro_batch: int) -> None:
    agreement = Workshop(CONFIG, batch_of()).agreement(
        Setting("cpu", dtype, micro_batch=micro_batch)
    )
    assert agreement.fault(dtype) is None
    if dtype == "float32":
        assert agreement.gradients > 0.999999


def test_what_is_compared_of_float8_is_float8_and_not_its_first_step() -> None:
    workshop = Workshop(CONFIG, batch_of())
    half, eighth = (workshop.agreement(Setting("cpu", dtype)) for dtype in ("bfloat16", "float8"))
    assert 1 - eighth.gradients > 5 * (1 - half.gradients)
    assert eighth.gradients > 0.9


def test_wrong_gradients_are_noticed_where_the_loss_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workshop = Workshop(CONFIG, batch_of())
    right = workshop.agreement(Setting("cpu"))
    assert right.fault("float32") is None

    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 0.5 * grad

    exact = kernels.attention

    def attention(qkv_BLD: Tensor, heads: int, form: str, *, causal: bool) -> Tensor:
        return exact(Leaky.apply(qkv_BLD), heads, form, causal=causal)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(kernels, "attention", attention)
    wrong = workshop.agreement(Setting("cpu"))
    assert wrong.loss < 1e-6
    fault = wrong.fault("float32")
    assert fault is not None
    assert "gradients" in fault


CPU = Cpu()


TINY = SHAPES["tiny"]


def test_a_rehearsal_learns() -> None:
    rehearsal = Rehearsal(small(), CPU)
    step = rehearsal.repeated()
    first = step().loss
    assert min(step().loss for _ in range(20)) < first


def test_images_are_made_once_and_differ() -> None:
    pairs = some_pairs(6, 16)
    assert pairs.pixels.shape == (6, 16, 16, 3)
    assert len({image.tobytes() for image in pairs.pixels[:]}) == 6
    assert some_pairs(6, 16) is pairs


def test_a_workload_leaves_nothing_to_choose() -> None:
    train = make_workload(TINY, 4, CPU).train
    assert "auto" not in (
        train.loader_threads,
        *(getattr(train, field.name) for field in dataclasses.fields(Setting)),
    )

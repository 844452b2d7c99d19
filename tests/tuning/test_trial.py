"""A setting counts only where it computes what float32 on the CPU computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapclip.model import kernels
from lapclip.tuning.trial import Setting, TrialBench

from .made import CONFIG, batch_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_right_settings_agree(dtype: str, micro_batch: int) -> None:
    agreement = TrialBench(CONFIG, batch_of()).check(Setting("cpu", dtype, micro_batch=micro_batch))
    assert agreement.find_fault(dtype) is None
    if dtype == "float32":
        assert agreement.gradient_cosine > 0.999999


def test_wrong_gradients_are_noticed_where_the_loss_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = TrialBench(CONFIG, batch_of())
    right = bench.check(Setting("cpu"))
    assert right.find_fault("float32") is None

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
    wrong = bench.check(Setting("cpu"))
    assert wrong.loss_difference < 1e-6
    fault = wrong.find_fault("float32")
    assert fault is not None
    assert "gradients" in fault

"""A setting counts only where it computes what float32 on the CPU computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapclip.model import kernels
from lapclip.tuning.measure import Setting, Workshop

from .made import CONFIG, batch_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_right_settings_agree(dtype: str, micro_batch: int) -> None:
    agreement = Workshop(CONFIG, batch_of()).agreement(
        Setting("cpu", dtype, micro_batch=micro_batch)
    )
    assert agreement.fault(dtype) is None
    if dtype == "float32":
        assert agreement.gradients > 0.999999


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

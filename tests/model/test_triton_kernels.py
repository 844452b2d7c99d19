"""Our kernels for CUDA give what the plain computation gives in float64, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.model.kernels import Compute, attention, has_triton, linear_gelu, projected_attention

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_triton(torch.device("cuda"), torch.bfloat16)),
    reason="needs a CUDA device, and Triton",
)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the norm of the difference, relative to the norm."""


def assert_same(run: Callable[..., Tensor], plain: Callable[..., Tensor], shapes: list[tuple], dtype: torch.dtype):
    draw = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=draw).to("cuda", dtype) for shape in shapes]
    exact = [part.detach().double() for part in mine]
    for part in (*mine, *exact):
        part.requires_grad_()
    got, wanted = run(*mine), plain(*exact)
    gradient = torch.randn(got.shape, generator=draw).to("cuda", dtype)
    got.backward(gradient)
    wanted.backward(gradient.double())
    pairs = [(got, wanted), *((one.grad, other.grad) for one, other in zip(mine, exact, strict=True))]
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= TOLERANCE[dtype] * other.norm()


def plain_attention(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return seen.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(2, 2, 32), (17, 4, 32), (24, 8, 64), (50, 12, 64), (64, 2, 16),
                                                       (77, 8, 64), (197, 12, 64), (256, 2, 64)])  # fmt: skip
def test_attention(tokens: int, heads: int, size: int, causal: bool, dtype: torch.dtype) -> None:
    width = heads * size
    assert_same(
        lambda x: attention(x, heads, "triton", causal=causal),
        lambda x: plain_attention(x, heads, causal),
        [(3, tokens, 3 * width)],
        dtype,
    )
    compute = Compute(attention="triton")
    assert_same(
        lambda x, weight, bias: projected_attention(x, weight / 16, bias, heads, compute, causal=causal),
        lambda x, weight, bias: plain_attention(x @ (weight / 16).T + bias, heads, causal),
        [(3, tokens, width), (3 * width, width), (3 * width,)],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 257, 1000])
@pytest.mark.parametrize("width", [96, 512])
def test_gelu_with_the_gradient_of_the_bias(width: int, rows: int, dtype: torch.dtype) -> None:
    assert_same(
        lambda x, weight, bias: linear_gelu(x, weight / 8, bias, "triton"),
        lambda x, weight, bias: F.gelu(x @ (weight / 8).T + bias),
        [(rows, 64), (width, 64), (width,)],
        dtype,
    )


def test_longer_sequences_take_torchs_own_form() -> None:
    qkv = torch.randn(2, 300, 3 * 64, device="cuda", dtype=torch.bfloat16)
    plain, asked = (attention(qkv, 1, form, causal=True) for form in ("fused", "triton"))
    assert torch.equal(plain, asked)

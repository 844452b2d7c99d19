"""Our kernels for CUDA give what the plain computation gives in float64, outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.data.pixels import mean_and_std, normalise
from lapclip.model.block import Block
from lapclip.model.kernels import (
    Compute,
    attention,
    has_triton,
    linear_gelu,
    projected_attention,
    residual_norm,
)
from lapclip.model.shapes import SHAPES

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_triton(torch.device("cuda"), torch.bfloat16)),
    reason="needs a CUDA device, and Triton",
)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the norm of the difference, relative to the norm."""


def assert_same(
    run: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    shapes: list[tuple],
    dtype: torch.dtype,
):
    draw = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=draw).to("cuda", dtype) for shape in shapes]
    exact = [part.detach().double() for part in mine]
    for part in (*mine, *exact):
        part.requires_grad_()
    got, wanted = run(*mine), plain(*exact)
    gradient = torch.randn(got.shape, generator=draw).to("cuda", dtype)
    got.backward(gradient)
    wanted.backward(gradient.double())
    pairs = [
        (got, wanted),
        *((one.grad, other.grad) for one, other in zip(mine, exact, strict=True)),
    ]
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
                                                       (77, 8, 64), (90, 2, 64), (100, 2, 32), (197, 12, 64),
                                                       (256, 2, 64)])  # fmt: skip
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
        lambda x, weight, bias: projected_attention(
            x, weight / 16, bias, heads, compute, causal=causal
        ),
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 129, 1000])
@pytest.mark.parametrize("width", [96, 512, 768, 1664, 2048])
def test_norm_with_what_goes_past_it_and_the_gradient_of_the_branch_s_bias(
    width: int, rows: int, dtype: torch.dtype
) -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor, branch_bias: Tensor) -> Tensor:
        normed, x, takes_bias_gradient = residual_norm(x, weight, bias, 1e-5, branch_bias, "triton")
        assert not takes_bias_gradient
        return x + (3 * normed + branch_bias.detach())

    assert_same(
        run,
        lambda x, weight, bias, branch_bias: (
            x + 3 * F.layer_norm(x, (width,), weight, bias) + branch_bias
        ),
        [(2, rows, width), (width,), (width,), (width,)],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("batch", "side"), [(1, 1), (3, 37), (2, 224)])
def test_pixels_are_normalised_to_the_bit(batch: int, side: int, dtype: torch.dtype) -> None:
    pixels = torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8, device="cuda")
    shape = SHAPES["seed"]
    statistics = mean_and_std(shape.pixel_mean, shape.pixel_std, 1, pixels.device)
    from lapclip.model import triton_kernels

    assert torch.equal(
        triton_kernels.normalise(pixels, *statistics, dtype), normalise(pixels, shape).to(dtype)
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", ["", "ln_1", "attention.out.bias", "mlp_out"])
def test_a_block_has_the_gradients_of_the_plain_one(frozen: str, compiled: bool) -> None:
    """All our kernels at once, in the precision of training: products in bfloat16, norms with weights in float32."""
    torch.manual_seed(0)
    block = Block(256, 4, causal=True)
    block.initialise(2, torch.Generator().manual_seed(0))
    for name, parameter in block.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter)
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    exact = copy.deepcopy(block).double()
    block.to("cuda")
    for name, parameter in block.named_parameters():
        parameter.data = parameter.data if "ln_" in name else parameter.data.bfloat16()
    for module in block.modules():
        if hasattr(module, "compute"):
            setattr(module, "compute", Compute(torch.bfloat16, attention="triton", linear="triton"))  # noqa: B010
    x, gradient = torch.randn(2, 3, 77, 256).bfloat16().unbind(0)
    mine, plain = x.cuda().requires_grad_(), x.double().requires_grad_()
    if compiled:
        block.compile()
    got, wanted = block(mine), exact(plain)
    got.backward(gradient.cuda())
    wanted.backward(gradient.double())
    pairs = [(got, wanted), (mine.grad, plain.grad)]
    for (name, one), other in zip(block.named_parameters(), exact.parameters(), strict=True):
        assert (one.grad is None) == (not one.requires_grad), name
        pairs += [(one.grad, other.grad)] if one.requires_grad else []
    for one, other in pairs:
        assert (one.cpu().double() - other).norm() <= TOLERANCE[torch.bfloat16] * other.norm()


def test_longer_sequences_take_torchs_own_form() -> None:
    qkv = torch.randn(2, 300, 3 * 64, device="cuda", dtype=torch.bfloat16)
    plain, asked = (attention(qkv, 1, form, causal=True) for form in ("fused", "triton"))
    assert torch.equal(plain, asked)

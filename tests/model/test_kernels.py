"""Every form of an operation gives what the plain one gives in float64, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lapclip.machine.cpu import Cpu
from lapclip.model.block import Block
from lapclip.model.kernels import (
    Compute,
    attention,
    has_onednn,
    layer_norm,
    linear,
    linear_gelu,
    mlp,
    one_query_attention,
    residual_norm,
)
from lapclip.tuning.kernels import forms_here

ATTENTION, LINEAR = (forms_here(name, Cpu(), "float32") for name in ("image_attention", "linear"))
"""What a CPU has; `test_triton_kernels.py` has what CUDA has."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Of the norm of the difference, relative to the norm."""


def assert_same(
    run: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: list[Tensor],
    dtype: torch.dtype,
):
    """inputs[0] is an activation in the precision under test; the others are weights, always in float32."""
    mine = [inputs[0].to(dtype), *(part.float() for part in inputs[1:])]
    # Rounding the activation is not the operation's fault, so the plain one starts from the rounded value.
    exact = [part.detach().double() for part in mine]
    for part in (*mine, *exact):
        part.requires_grad_()
    got, wanted = run(*mine), plain(*exact)
    assert got.dtype == dtype
    gradient = torch.randn(got.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    got.backward(gradient)
    wanted.backward(gradient.double())
    assert_close(got, wanted, dtype)
    for one, other in zip(mine, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == one.dtype
        assert_close(one.grad, other.grad, dtype)


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert (got.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


def draw(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def plain_attention(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
    )
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 24, 65])
@pytest.mark.parametrize("form", ATTENTION)
def test_attention(form: str, length: int, causal: bool, dtype: torch.dtype) -> None:
    qkv = draw(3, length, 3 * 32)
    assert_same(
        lambda x: attention(x, 4, form, causal=causal),
        lambda x: plain_attention(x, 4, causal),
        [qkv],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 128), (128, 32), (64, 64), (33, 7)])
@pytest.mark.parametrize("form", LINEAR)
def test_linear(form: str, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    if form == "onednn" and not has_onednn(torch.device("cpu"), dtype):
        pytest.skip(
            f"oneDNN is not in this build of torch, or does not compute {dtype} on this processor"
        )
    assert_same(
        lambda x, weight, bias: linear(x, weight, bias, form),
        lambda x, weight, bias: x @ weight.T + bias,
        [draw(3, 5, inputs), draw(outputs, inputs), draw(outputs)],
        dtype,
    )
    assert_same(
        lambda x, weight, bias, added: linear(x, weight, bias, form, added),
        lambda x, weight, bias, added: added + (x @ weight.T + bias),
        [draw(3, 5, inputs), draw(outputs, inputs), draw(outputs), draw(3, 5, outputs)],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_one_query_sees_what_it_would_see_with_keys_and_values(
    masked: bool, dtype: torch.dtype
) -> None:
    width, heads, length = 32, 4, 9
    mask = (
        (torch.arange(length) <= torch.tensor([[8], [3], [0]]))[:, None, None, :]
        if masked
        else None
    )

    def plain(x: Tensor, query: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        key, value = (x @ weight.T + torch.cat([torch.ones_like(bias), bias])).chunk(2, dim=-1)
        query, key, value = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in (query.to(x.dtype)[:, None], key, value)
        )
        scores = query @ key.mT / (width // heads) ** 0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(1)

    assert_same(
        lambda x, query, weight, bias: one_query_attention(
            x, query.to(x.dtype), weight, bias, heads, mask
        ),
        plain,
        [draw(3, length, width), draw(3, width), draw(2 * width, width), draw(width)],
        dtype,
    )


@pytest.mark.parametrize("form", LINEAR)
def test_linear_gelu(form: str) -> None:
    assert_same(
        lambda x, weight, bias: linear_gelu(x, weight, bias, form),
        lambda x, weight, bias: torch.nn.functional.gelu(x @ weight.T + bias),
        [draw(3, 5, 32), draw(64, 32), draw(64)],
        torch.float32,
    )


def plain_mlp(
    x: Tensor,
    added: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
) -> Tensor:
    hidden = torch.nn.functional.gelu(x @ weight_in.T + bias_in)
    return added + hidden @ weight_out.T + bias_out


MLP = [(3, 5, 32), (3, 5, 32), (64, 32), (64,), (32, 64), (32,)]
"""The shapes of what an MLP is given."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", LINEAR)
def test_mlp(form: str, dtype: torch.dtype) -> None:
    assert_same(
        lambda x, added, *layers: mlp(x, *layers, added=added, form=form),
        plain_mlp,
        [draw(*shape) for shape in MLP],
        dtype,
    )


@pytest.mark.parametrize("form", LINEAR)
@pytest.mark.parametrize("frozen", range(6))
def test_mlp_gives_what_learns_its_gradient_and_keeps_no_activation(frozen: int, form: str) -> None:
    mine = [draw(*shape).float().requires_grad_(at != frozen) for at, shape in enumerate(MLP)]
    exact = [part.detach().double().requires_grad_(part.requires_grad) for part in mine]
    saved: list[Tensor] = []
    x, added, *layers = mine
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        got = mlp(x, *layers, added=added, form=form)
    assert sum(tuple(tensor.shape) == (15, 64) for tensor in saved) == 1
    got.sum().backward()
    plain_mlp(*exact).sum().backward()
    for at, (one, other) in enumerate(zip(mine, exact, strict=True)):
        assert (one.grad is None) == (at == frozen)
        if one.grad is not None and other.grad is not None:
            assert_close(one.grad, other.grad, torch.float32)


def test_a_block_keeps_its_hidden_layer_once() -> None:
    block, saved = Block(32, 2, causal=False), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        block(draw(3, 5, 32).float())
    shapes = [tuple(tensor.shape) for tensor in saved]
    assert shapes.count((15, 128)) == 1
    assert (3, 5, 128) not in shapes


@pytest.mark.parametrize("form", [*LINEAR, "triton"])
def test_a_norm_leaves_the_gradient_of_a_bias_to_the_branch_where_no_kernel_of_ours_takes_it(
    form: str,
) -> None:
    x, weight, bias = draw(3, 5, 32).float(), draw(32).float(), draw(32).float()
    normed, beside, takes_bias_gradient = residual_norm(x, weight, bias, 1e-5, bias, form)
    assert takes_bias_gradient
    assert beside is x
    assert torch.equal(normed, layer_norm(x, weight, bias, 1e-5))


def test_forms_are_really_different_code() -> None:
    """Otherwise the tests above compare something with itself."""
    qkv = draw(2, 40, 3 * 64).float()
    forms = [attention(qkv, 4, form, causal=False) for form in ATTENTION]
    assert not torch.equal(*forms)
    x, weight = draw(5, 8).float().requires_grad_(), draw(3, 8).float()
    names = {form: type(linear(x, weight, None, form).grad_fn).__name__ for form in LINEAR}
    assert ("OneDnn" in names["onednn"]) == has_onednn(torch.device("cpu"))
    assert "OneDnn" not in names["torch"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layer_norm_keeps_the_precision_of_its_input(dtype: torch.dtype) -> None:
    assert_same(
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        lambda x, weight, bias: torch.nn.functional.layer_norm(x, (64,), weight, bias, 1e-5),
        [draw(3, 5, 64), draw(64), draw(64)],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_compiler_sees_a_block_as_one_graph(dtype: torch.dtype) -> None:
    """Where it cannot look into a layer, it compiles what lies between layers by itself, and soon gives up."""
    block = Block(64, 2, causal=False)
    for part in (
        block.attention,
        block.attention.qkv,
        block.attention.out,
        block.mlp_in,
        block.mlp_out,
    ):
        part.compute = Compute(attention="products", linear=LINEAR[-1])
    x = draw(2, 5, 64).to(dtype).requires_grad_()
    torch.compile(block, backend="eager", fullgraph=True)(x).float().sum().backward()
    assert x.grad is not None

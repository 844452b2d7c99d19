"""The operations of a block, each in several forms that give the same result at different speeds.

Which form is fastest depends on the machine, the precision and the sizes, so it is measured (`lapclip.tuning`), not
assumed. A weight that is kept in another precision than the input's is rounded on its way into a product, and its
gradient comes back in the weight's own.

Shapes: B batch, L tokens, D width, H heads, N rows, I inputs, O outputs, F width inside an MLP; K is summed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapclip.machine.choose_device import (
    norms_mixed_dtypes,
    ready_for_attention,
    recomputes_gelu,
    runs_onednn,
    runs_triton,
    trusts_is_causal,
)


@dataclass(frozen=True)
class Compute:
    """How a model computes: its precision, and the form of each operation."""

    dtype: torch.dtype | None = None
    """Precision of activations and products; None is the weights' own."""
    attention: str = "fused"
    """`fused` is torch's own attention; `products` writes it as two products with a softmax between them; `triton` is
    our own kernel for short sequences on CUDA."""
    linear: str = "torch"
    """`torch` takes the library torch prefers; `onednn` asks for oneDNN, which is often faster on AMD processors;
    `triton` has our own kernels compute GELU and norms, with the gradients of biases beside them, on CUDA."""
    recompute: bool = False
    """Compute each block but the last again in the backward pass instead of keeping what it computed."""


def has_onednn(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the `onednn` form can be had: on the CPU, in builds of torch that carry the library.

    It computes bfloat16 only on processors that know it; torch's own form does so everywhere.
    """
    if not runs_onednn(device) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def has_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the `triton` form of an operation can be had: on CUDA, in half precision."""
    return dtype in (torch.bfloat16, torch.float16) and runs_triton(device)


def is_exported() -> bool:
    """Whether a model is being written down for other programs. `torch.compile` claims that too while it looks on."""
    traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return traced or (torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling())


def layer_norm(x_BLD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Computed in float32, given back in the precision of its input."""
    if x_BLD.dtype == weight_D.dtype or norms_mixed_dtypes(x_BLD.device):
        return F.layer_norm(x_BLD, weight_D.shape, weight_D, bias_D, eps)
    return F.layer_norm(x_BLD.to(weight_D.dtype), weight_D.shape, weight_D, bias_D, eps).to(
        x_BLD.dtype
    )


def residual_norm(
    x_BLD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    branch_bias_D: Tensor | None,
    form: str,
) -> tuple[Tensor, Tensor, bool]:
    """The norm of x, which enters a branch; x itself, the residual that the branch is added to; and whether the branch
    takes the gradient of its last bias. `triton` takes it here: the gradient of a sum is that of both its terms."""
    if form == "triton" and has_triton(x_BLD.device, x_BLD.dtype):
        from lapclip.model.triton_kernels import WIDEST, Norm

        if x_BLD.shape[-1] <= WIDEST:
            normed_BLD, residual_BLD = Norm.apply(x_BLD, weight_D, bias_D, branch_bias_D, eps)  # pyright: ignore[reportGeneralTypeIssues]
            return normed_BLD, residual_BLD, branch_bias_D is None
    return layer_norm(x_BLD, weight_D, bias_D, eps), x_BLD, True


def linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    form: str,
    added: Tensor | None = None,
) -> Tensor:
    """Return x times the transposed weight, plus the bias and `added`, in the precision of x."""
    added = None if added is None else added.to(x.dtype)
    # A compiler takes torch's form: it chooses the library itself, and cannot look into the other. It is asked first,
    # because it cannot look into `has_onednn`, either, and would compile what is before and after each layer by itself.
    if form == "onednn" and not torch.compiler.is_compiling() and has_onednn(x.device, x.dtype):
        return _OneDnnLinear.apply(x, weight_OI, bias_O, added)  # pyright: ignore[reportReturnType]
    y = F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))
    return y if added is None else added + y


def linear_gelu(x: Tensor, weight_OI: Tensor, bias_O: Tensor, form: str) -> Tensor:
    """Return GELU of a linear layer's result."""
    if form == "triton" and has_triton(x.device, x.dtype):
        from lapclip.model.triton_kernels import Gelu

        y = linear(x, weight_OI, bias_O.detach(), form)
        return Gelu.apply(y, bias_O)  # pyright: ignore[reportReturnType]
    return F.gelu(linear(x, weight_OI, bias_O, form))


def mlp(
    x: Tensor,
    weight_FI: Tensor,
    bias_F: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor,
    added: Tensor,
    form: str,
) -> Tensor:
    """Return two linear layers with GELU between them, plus `added`."""
    # Compilers and exports are to look inside, and without gradients nothing is kept anyway.
    plain = torch.compiler.is_compiling() or is_exported() or not torch.is_grad_enabled()
    if plain or not recomputes_gelu(x.device):
        hidden = linear_gelu(x, weight_FI, bias_F, form)
        return linear(hidden, weight_OF, bias_O, form, added)
    form = "onednn" if form == "onednn" and has_onednn(x.device, x.dtype) else "torch"
    return _Mlp.apply(x, weight_FI, bias_F, weight_OF, bias_O, added.to(x.dtype), form)  # pyright: ignore[reportReturnType]


def projected_attention(
    x_BLD: Tensor,
    weight: Tensor,
    bias: Tensor,
    heads: int,
    compute: Compute,
    *,
    causal: bool,
) -> Tensor:
    """Return the attention of the queries, keys and values that a projection (3 D, D) makes of x."""
    if compute.attention == "triton" and fits_triton(x_BLD, heads):
        # The kernel takes the gradient of the bias as well.
        qkv_BLD = linear(x_BLD, weight, bias.detach(), compute.linear)
        return attention(qkv_BLD, heads, compute.attention, causal=causal, bias=bias)
    qkv_BLD = linear(x_BLD, weight, bias, compute.linear)
    return attention(qkv_BLD, heads, compute.attention, causal=causal)


def fits_triton(x_BLD: Tensor, heads: int) -> bool:
    """Whether the `triton` form of attention can be had for sequences like these."""
    if not has_triton(x_BLD.device, x_BLD.dtype):
        return False
    from lapclip.model.triton_kernels import HEAD_SIZES, LONGEST

    return x_BLD.shape[1] <= LONGEST and x_BLD.shape[2] / heads in HEAD_SIZES


def attention(
    qkv_BLD: Tensor, heads: int, form: str, *, causal: bool, bias: Tensor | None = None
) -> Tensor:
    """Multi-head self-attention of fused queries, keys and values (B, L, 3 D) to (B, L, D).

    The bias is one that was added to them without a gradient, which `triton` then takes on the way.
    """
    if form == "products":
        return _ProductAttention.apply(qkv_BLD, heads, causal)  # pyright: ignore[reportReturnType]
    if form == "triton" and fits_triton(qkv_BLD, 3 * heads):
        from lapclip.model.triton_kernels import ShortAttention

        return ShortAttention.apply(qkv_BLD, bias, heads, causal)  # pyright: ignore[reportReturnType]
    query, key, value = (split_heads(part, heads) for part in qkv_BLD.chunk(3, dim=-1))
    if causal and not trusts_is_causal(qkv_BLD.device):
        mask_LL = torch.ones(
            qkv_BLD.shape[1], qkv_BLD.shape[1], dtype=torch.bool, device=qkv_BLD.device
        ).tril()
        return merge_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask_LL))
    return merge_heads(F.scaled_dot_product_attention(query, key, value, is_causal=causal))


def one_query_attention(
    x_BLD: Tensor,
    query_BD: Tensor,
    key_value_weight: Tensor,
    value_bias_D: Tensor,
    heads: int,
    mask: Tensor | None,
) -> Tensor:
    """Attention of one query of each sequence over all its tokens, without computing keys and values (B, D).

    q (W x) is (q W) x, and the sum of p (W x) is W times the sum of p x: so each head's query goes through the weights
    of the keys once, and what it sees goes through those of the values, instead of every token through both. The bias
    of the keys adds the same to all scores of a query, which a softmax does not see, so it is not asked for.
    key_value_weight is (2 D, D); the mask is (B, 1, 1, L).
    """
    key_HdD, value_HdD = key_value_weight.to(x_BLD.dtype).unflatten(0, (2, heads, -1)).unbind(0)
    size = key_HdD.shape[1]
    query_HBd = (query_BD * size**-0.5).unflatten(-1, (heads, size)).transpose(0, 1)
    query_BHD = torch.bmm(query_HBd, key_HdD).transpose(0, 1)
    # Products in half precision are slow where rows have an odd number of tokens, so there each token has a row.
    by_head = x_BLD.dtype not in (torch.bfloat16, torch.float16)  # (B, H, L), else (B, L, H)
    scores = torch.bmm(query_BHD, x_BLD.mT) if by_head else torch.bmm(x_BLD, query_BHD.mT)
    if mask is not None:
        visible_B1L = mask.squeeze(1)
        scores = scores.masked_fill(~(visible_B1L if by_head else visible_B1L.mT), -torch.inf)
    weights_BHL = scores.softmax(-1) if by_head else scores.softmax(1).mT
    seen_HBD = torch.bmm(weights_BHL, x_BLD).transpose(0, 1)
    return torch.bmm(seen_HBD, value_HdD.mT).transpose(0, 1).flatten(1) + value_bias_D.to(
        x_BLD.dtype
    )


def split_heads(x_BLD: Tensor, heads: int) -> Tensor:
    """(B, L, D) to (B, H, L, D / H)."""
    return ready_for_attention(x_BLD.unflatten(-1, (heads, -1)).transpose(1, 2))


def merge_heads(x_BHLD: Tensor) -> Tensor:
    """(B, H, L, D / H) to (B, L, D)."""
    return x_BHLD.transpose(1, 2).flatten(-2)


class _OneDnnLinear(torch.autograd.Function):
    """A linear layer by oneDNN, forward and backward.

    torch takes MKL for float32, which holds back on processors that are not Intel's; oneDNN does not.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, added: Tensor | None
    ) -> Tensor:
        rounded_OI = weight_OI.to(x.dtype)
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI, rounded_OI)
        ctx.x_shape, ctx.weight_dtype = x.shape, weight_OI.dtype
        rounded_O = None if bias_O is None else bias_O.to(x.dtype)
        added_NO = None if added is None else added.reshape(-1, added.shape[-1])
        return _onednn_product(x_NI, rounded_OI, rounded_O, added_NO).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        wants_x, wants_weight, wants_bias, wants_added = ctx.needs_input_grad
        return (
            _onednn_product(grad_NO, weight_OI.T).view(ctx.x_shape) if wants_x else None,
            _weight_gradient(x_NI, grad_NO, "onednn").to(ctx.weight_dtype)
            if wants_weight
            else None,
            grad_NO.sum(0, dtype=ctx.weight_dtype) if wants_bias else None,
            grad if wants_added else None,
        )


class _Mlp(torch.autograd.Function):
    """Two linear layers with GELU between them, added to something.

    What GELU made is not kept: to write it into memory and to read it back takes longer than to compute it again from
    its input, which has to be read in any case. Backward, GELU's gradient is written over the one it is made from.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight_FI: Tensor,
        bias_F: Tensor,
        weight_OF: Tensor,
        bias_O: Tensor,
        added: Tensor,
        form: str,
    ) -> Tensor:
        x_NI, added_NO = x.reshape(-1, x.shape[-1]), added.reshape(-1, added.shape[-1])
        rounded_FI, rounded_OF = weight_FI.to(x.dtype), weight_OF.to(x.dtype)
        inner_NF = _product(x_NI, rounded_FI, form, bias_F.to(x.dtype))
        ctx.save_for_backward(
            x_NI if ctx.needs_input_grad[1] else None, inner_NF, rounded_FI, rounded_OF
        )
        ctx.form, ctx.x_shape, ctx.weight_dtypes = form, x.shape, (weight_FI.dtype, weight_OF.dtype)
        return _product(F.gelu(inner_NF), rounded_OF, form, bias_O.to(x.dtype), added_NO).view(
            added.shape
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NI, inner_NF, weight_FI, weight_OF = ctx.saved_tensors
        form, (in_dtype, out_dtype) = ctx.form, ctx.weight_dtypes
        grad_NO = grad.reshape(-1, grad.shape[-1])
        wants_x, wants_in, wants_in_bias, wants_out, wants_out_bias, wants_added, _ = (
            ctx.needs_input_grad
        )
        out_weight = (
            _weight_gradient(F.gelu(inner_NF), grad_NO, form).to(out_dtype) if wants_out else None
        )
        out_bias = grad_NO.sum(0, dtype=out_dtype) if wants_out_bias else None
        grad_x = in_weight = in_bias = None
        if wants_x or wants_in or wants_in_bias:
            grad_NF = _product(grad_NO, weight_OF.T, form)
            torch.ops.aten.gelu_backward.grad_input(grad_NF, inner_NF, grad_input=grad_NF)
            grad_x = _product(grad_NF, weight_FI.T, form).view(ctx.x_shape) if wants_x else None
            in_weight = _weight_gradient(x_NI, grad_NF, form).to(in_dtype) if wants_in else None
            in_bias = grad_NF.sum(0, dtype=in_dtype) if wants_in_bias else None
        return grad_x, in_weight, in_bias, out_weight, out_bias, grad if wants_added else None, None


def _product(
    left_NK: Tensor,
    right_MK: Tensor,
    form: str,
    bias_M: Tensor | None = None,
    added_NM: Tensor | None = None,
) -> Tensor:
    """left times the transposed right, plus what is to be added."""
    if form == "onednn":
        return _onednn_product(left_NK, right_MK, bias_M, added_NM)
    found_NM = F.linear(left_NK, right_MK, bias_M)
    return found_NM if added_NM is None else found_NM.add_(added_NM)


def _onednn_product(
    left_NK: Tensor, right_MK: Tensor, bias_M: Tensor | None = None, added_NM: Tensor | None = None
) -> Tensor:
    """left times the transposed right, plus what is to be added, in one pass over the result."""
    if added_NM is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(left_NK, added_NM, right_MK, bias_M, "add")
    return torch.ops.mkldnn._linear_pointwise(left_NK, right_MK, bias_M, "none", [], "")


def _weight_gradient(x_NI: Tensor, grad_NO: Tensor, form: str) -> Tensor:
    """(O, I). oneDNN is quick when the result is wide, so that way round, and not when it is square."""
    inputs, outputs = x_NI.shape[1], grad_NO.shape[1]
    if form != "onednn" or x_NI.dtype != torch.float32 or inputs == outputs:
        return grad_NO.T @ x_NI
    if inputs > outputs:
        return _onednn_product(grad_NO.T, x_NI.T)
    return _onednn_product(x_NI.T, grad_NO.T).T


class _ProductAttention(torch.autograd.Function):
    """Attention as softmax(Q K / sqrt(d)) V, with heads laid out once, forward and backward.

    Keeps the (B H, L, L) weights, so it is for the short sequences of CLIP.
    """

    @staticmethod
    def forward(ctx, qkv_BLD: Tensor, heads: int, causal: bool) -> Tensor:
        batch, length, width = qkv_BLD.shape
        size = width // 3 // heads
        qkv_3NLD = (
            qkv_BLD.view(batch, length, 3, heads, size)
            .permute(2, 0, 3, 1, 4)
            .reshape(3, -1, length, size)
        )
        query, key, value = qkv_3NLD.unbind(0)
        # What a query may not see is at minus infinity before the softmax; with beta 0 the first argument is not read.
        hidden = (
            query.new_full((length, length), -torch.inf).triu_(1) if causal else query.new_empty(())
        )
        weights_NLL = torch.baddbmm(
            hidden, query, key.mT, beta=int(causal), alpha=size**-0.5
        ).softmax(-1)
        ctx.save_for_backward(qkv_3NLD, weights_NLL)
        ctx.heads = heads
        return merge_heads(torch.bmm(weights_NLL, value).view(batch, heads, length, size))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        qkv_3NLD, weights_NLL = ctx.saved_tensors
        query, key, value = qkv_3NLD.unbind(0)
        batch, length, width = grad.shape
        size = width // ctx.heads
        grad_NLD = grad.unflatten(-1, (ctx.heads, size)).transpose(1, 2).reshape(-1, length, size)
        grad_3NLD = torch.empty_like(qkv_3NLD)
        torch.bmm(weights_NLL.mT, grad_NLD, out=grad_3NLD[2])
        grad_weights = torch.bmm(grad_NLD, value.mT)
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_weights, weights_NLL, -1, weights_NLL.dtype
        )
        for at, left, right in ((0, grad_scores, key), (1, grad_scores.mT, query)):
            torch.baddbmm(grad_3NLD[at], left, right, beta=0, alpha=size**-0.5, out=grad_3NLD[at])
        return (
            grad_3NLD.view(3, batch, ctx.heads, length, size)
            .permute(1, 3, 0, 2, 4)
            .reshape(batch, length, -1),
            None,
            None,
        )

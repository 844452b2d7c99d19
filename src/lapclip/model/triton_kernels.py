"""Kernels for CUDA, written in Triton, that make fewer passes over memory than torch's own.

Attention of short sequences: one program has a whole head of a sequence, so that nothing is added up between programs;
queries, keys and values are read where the projection left them, and their gradients are written the same way. The
gradient of the projection's bias is the sum of those rows, and is summed while they are written: torch would read them
all once more. GELU does the same for the bias of the layer before it, and a norm, backward, for its own weight and bias
and for the last bias of the branch that it leads into. Pixels are normalised and rounded in one pass.

They give half precision, and compute in float32 between two products. Imported only where Triton is there
(`machine/choose_device.py`: `runs_triton`).

Shapes: B batch, L tokens, H heads, D size of a head, C columns (of images: colour channels), S image side.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 256
"""Tokens up to which a head of a sequence fits into one program."""
OWN_FORWARD = 64
"""Tokens up to which the forward pass is ours too; beyond that cuDNN's is faster, and what it keeps is all we need."""
HEAD_SIZES = (16, 32, 64)
LOG2_E = tl.constexpr(1.4426950408889634)
GELU_COLUMNS, GELU_ROWS = 128, 32
"""Columns of a program of GELU, and its rows forward."""
GELU_BACKWARD_ROWS, GELU_STEP, GELU_STAGES = 256, 16, 2
"""Its rows backward, how many of them it takes at a time, and how many such steps are loaded ahead."""
NORM_ROWS = 2
"""Rows that one program of a norm works on, forward; it has all columns."""
NORM_PROGRAMS, NORM_STAGES = 1056, 4
"""Backward, the programs that share all rows, eight for each multiprocessor of an H200; and how many rows of a program
are on their way at once."""
WIDEST = 2048
"""Columns up to which a program of a norm has them all."""


@triton.jit
def _attention_forward(
    qkv, out, log_sums, tokens, scale, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    CAUSAL: tl.constexpr
):  # fmt: skip
    """One head of a sequence."""
    head, sequence = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    width: tl.constexpr = HEADS * SIZE
    column, at = tl.arange(0, SIZE), tl.arange(0, PADDED)
    there = at < tokens
    rows = (
        qkv
        + sequence * tokens * 3 * width
        + head * SIZE
        + at[:, None] * 3 * width
        + column[None, :]
    )
    query = tl.load(rows, mask=there[:, None], other=0.0)
    key = tl.load(rows + width, mask=there[:, None], other=0.0)
    scores = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)  # 2 is the base of all exponents here
    allowed = there[None, :]
    if CAUSAL:
        allowed = allowed & (at[None, :] <= at[:, None])
    scores = tl.where(allowed, scores, float("-inf"))
    highest = tl.max(scores, 1)
    weights = tl.exp2(scores - highest[:, None])
    total = tl.sum(weights, 1)
    value = tl.load(rows + 2 * width, mask=there[:, None], other=0.0)
    found = tl.dot(weights.to(value.dtype), value) / total[:, None]
    out_rows = out + (sequence * tokens + at[:, None]) * width + head * SIZE + column[None, :]
    tl.store(out_rows, found.to(value.dtype), mask=there[:, None])
    tl.store(log_sums + tl.program_id(0) * tokens + at, highest + tl.log2(total), mask=there)


@triton.jit
def _some_keys(
    base, grad_base, key_at, tokens, query, query_at, grad_out, shared, log_sum, grad_query, key_sum, value_sum, scale,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """What some keys of a head add to the gradients of its queries; the gradients of keys and values are written."""
    there = key_at < tokens
    key_rows = key_at[:, None] * 3 * WIDTH + tl.arange(0, SIZE)[None, :]
    key = tl.load(base + key_rows + WIDTH, mask=there[:, None], other=0.0)
    value = tl.load(base + key_rows + 2 * WIDTH, mask=there[:, None], other=0.0)
    scores = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
    allowed = there[None, :]
    if CAUSAL:
        allowed = allowed & (key_at[None, :] <= query_at[:, None])
    weights = tl.where(allowed, tl.exp2(scores - log_sum[:, None]), 0.0)
    grad_value = tl.dot(tl.trans(weights.to(query.dtype)), grad_out)
    tl.store(grad_base + key_rows + 2 * WIDTH, grad_value.to(query.dtype), mask=there[:, None])
    grad_scores = (weights * (tl.dot(grad_out, tl.trans(value)) - shared[:, None])).to(query.dtype)
    grad_query = tl.dot(grad_scores, key, grad_query)
    grad_key = tl.dot(tl.trans(grad_scores), query) * scale
    tl.store(grad_base + key_rows + WIDTH, grad_key.to(query.dtype), mask=there[:, None])
    return grad_query, key_sum + tl.sum(grad_key, 0), value_sum + tl.sum(grad_value, 0)


@triton.jit
def _attention_backward(
    qkv, out, grad, log_sums, grad_qkv, sums, tokens, whole, scale, HEADS: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """All queries of one head of a sequence, KEYS keys at a time as far as there are that many, up to `whole`;
    those that are left are REST with their padding."""
    head, sequence = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    width: tl.constexpr = HEADS * SIZE
    column, query_at = tl.arange(0, SIZE), tl.arange(0, PADDED)
    base = qkv + sequence * tokens * 3 * width + head * SIZE
    grad_base = grad_qkv + sequence * tokens * 3 * width + head * SIZE
    seen = query_at < tokens
    rows = query_at[:, None] * 3 * width + column[None, :]
    query = tl.load(base + rows, mask=seen[:, None], other=0.0)
    out_rows = (sequence * tokens + query_at[:, None]) * width + head * SIZE + column[None, :]
    grad_out = tl.load(grad + out_rows, mask=seen[:, None], other=0.0)
    found = tl.load(out + out_rows, mask=seen[:, None], other=0.0)
    shared = tl.sum(found.to(tl.float32) * grad_out.to(tl.float32), 1)
    # Rows that are only padding have weights of zero.
    log_sum = tl.load(
        log_sums + tl.program_id(0) * tokens + query_at, mask=seen, other=float("inf")
    )
    grad_query = tl.zeros([PADDED, SIZE], tl.float32)
    key_sum, value_sum = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for first in range(0, whole, KEYS):
        grad_query, key_sum, value_sum = _some_keys(
            base, grad_base, first + tl.arange(0, KEYS), tokens, query, query_at, grad_out, shared, log_sum, grad_query,
            key_sum, value_sum, scale, width, SIZE, CAUSAL
        )  # fmt: skip
    if REST:
        grad_query, key_sum, value_sum = _some_keys(
            base, grad_base, whole + tl.arange(0, REST), tokens, query, query_at, grad_out, shared,
            log_sum, grad_query, key_sum, value_sum, scale, width, SIZE, CAUSAL
        )  # fmt: skip
    grad_query *= scale
    tl.store(grad_base + rows, grad_query.to(query.dtype), mask=seen[:, None])
    sums_at = sums + sequence * 3 * width + head * SIZE + column
    tl.store(sums_at, tl.sum(grad_query, 0))
    tl.store(sums_at + width, key_sum)
    tl.store(sums_at + 2 * width, value_sum)


@triton.jit
def _normal_tail(x):
    """The chance that a normal number is above |x|, and exp(-x x / 2).

    Abramowitz and Stegun, formula 7.1.26, to 1e-7: a third of the instructions of `erf`, which would be slower than
    memory is.
    """
    density = tl.exp2(x * x * (-0.5 * LOG2_E))
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    polynomial = (
        (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    ) * t
    return 0.5 * polynomial * density, density


@triton.jit
def _gelu_forward(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of rows and columns."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    here = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    tail, _ = _normal_tail(value)
    tl.store(
        out + at,
        (value * tl.where(value >= 0, 1.0 - tail, tail)).to(out.dtype.element_ty),
        mask=here,
    )


@triton.jit
def _gelu_backward(
    x, grad, grad_x, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """The same backward; the sum of each column goes to a row of its own, so that the order of sums is fixed."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for step in tl.range(
        0, ROWS, STEP, num_stages=STAGES
    ):  # the next rows are on their way meanwhile
        row = tl.program_id(0) * ROWS + step + tl.arange(0, STEP)
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        here = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        tail, density = _normal_tail(value)
        slope = tl.where(value >= 0, 1.0 - tail, tail) + value * density * 0.3989422804014327
        gradient = tl.load(grad + at, mask=here, other=0.0).to(tl.float32) * slope
        tl.store(grad_x + at, gradient.to(grad_x.dtype.element_ty), mask=here)
        total += gradient
    tl.store(sums + tl.program_id(0) * columns + column, tl.sum(total, 0), mask=inside)


@triton.jit
def _norm_forward(
    x, weight, bias, out, mean, inverse, rows, columns, epsilon, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Each program has a few rows."""
    column = tl.arange(0, PADDED)
    inside = column < columns
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    here = (row < rows)[:, None] & inside[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    middle = tl.sum(value, 1) / columns
    centred = tl.where(here, value - middle[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / columns + epsilon)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    normed = centred * scale[:, None] * factor[None, :] + added[None, :]
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=here)
    tl.store(mean + row, middle, mask=row < rows)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit
def _norm_backward(
    x, grad, residual, mean, inverse, weight, grad_x, sums, rows, times, columns, PADDED: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """Every row that is a multiple of the number of programs away from this one's first. Their sums go to rows of their
    own, so that the order of sums is fixed."""
    column = tl.arange(0, PADDED)
    inside = column < columns
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
    of_branch = tl.zeros([PADDED], tl.float32)
    for step in tl.range(0, times, num_stages=STAGES):  # the next rows are on their way meanwhile
        row = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        at, here = row * columns + column, inside & (row < rows)
        gradient = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        passing = tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)
        normed = tl.where(
            here, (value - tl.load(mean + row, mask=row < rows, other=0.0)) * scale, 0.0
        )
        scaled = gradient * factor
        along = tl.sum(scaled * normed, 0) / columns
        found = scale * (scaled - tl.sum(scaled, 0) / columns - normed * along) + passing
        tl.store(grad_x + at, found.to(grad_x.dtype.element_ty), mask=here)
        of_weight += gradient * normed
        of_bias += gradient
        of_branch += passing
    sums_at = sums + tl.program_id(0) * 3 * columns + column
    tl.store(sums_at, of_weight, mask=inside)
    tl.store(sums_at + columns, of_bias, mask=inside)
    tl.store(sums_at + 2 * columns, of_branch, mask=inside)


@triton.jit
def _normalise(pixels, mean, std, out, area, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """Some pixels of an image, one colour channel after the other."""
    pixel, image = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS), tl.program_id(0).to(tl.int64)
    here = pixel < area
    for channel in tl.static_range(CHANNELS):
        value = tl.load(
            pixels + (image * area + pixel) * CHANNELS + channel, mask=here, other=0
        ).to(tl.float32)
        # Divided as torch divides, so that the bits are the same.
        normalised = tl.div_rn(value - tl.load(mean + channel), tl.load(std + channel))
        tl.store(
            out + (image * CHANNELS + channel) * area + pixel,
            normalised.to(out.dtype.element_ty),
            mask=here,
        )


def normalise(pixels_BSSC: Tensor, mean_C: Tensor, std_C: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 images, channels last, minus a mean and divided by a deviation, channels first, in one pass."""
    pixels_BSSC = pixels_BSSC.contiguous()
    batch, height, width, channels = pixels_BSSC.shape
    out_BCSS = pixels_BSSC.new_empty(batch, channels, height, width, dtype=dtype)
    block = 1024
    _normalise[batch, triton.cdiv(height * width, block)](  # CUDA limits the second to 65,535
        pixels_BSSC, mean_C, std_C, out_BCSS, height * width, block, channels, num_warps=4
    )
    return out_BCSS


def _padded(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


@torch.library.custom_op("lapclip::attention", mutates_args=())
def attention_forward(qkv_BLC: Tensor, heads: int, causal: bool) -> tuple[Tensor, Tensor]:
    """What the queries see, (B, L, H D), and the logarithms of the sums of their weights, to base 2, (B H, L)."""
    batch, tokens, width = qkv_BLC.shape[0], qkv_BLC.shape[1], qkv_BLC.shape[2] // 3
    qkv_BLC, size, padded = qkv_BLC.contiguous(), width // heads, _padded(tokens)
    if padded > OWN_FORWARD:
        query, key, value = (
            qkv_BLC.view(batch, tokens, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        )
        found, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False
        )
        return found.transpose(1, 2).contiguous().flatten(2), log_sums.reshape(
            -1, tokens
        ) * LOG2_E.value
    out = qkv_BLC.new_empty(batch, tokens, width)
    log_sums = qkv_BLC.new_empty(batch * heads, tokens, dtype=torch.float32)
    _attention_forward[(batch * heads,)](
        qkv_BLC, out, log_sums, tokens, size**-0.5, heads, size, padded, causal, num_warps=4
    )  # fmt: skip
    return out, log_sums


@attention_forward.register_fake
def _(qkv_BLC: Tensor, heads: int, causal: bool) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv_BLC.shape
    return qkv_BLC.new_empty(batch, tokens, width // 3), qkv_BLC.new_empty(
        batch * heads, tokens, dtype=torch.float32
    )


@torch.library.custom_op("lapclip::attention_backward", mutates_args=())
def attention_backward(
    grad_BLC: Tensor, qkv_BLC: Tensor, out_BLC: Tensor, log_sums: Tensor, heads: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of queries, keys and values, as they came, and their sum over the tokens of each sequence."""
    batch, tokens, width = grad_BLC.shape
    qkv_BLC, grad_BLC, size, padded = (
        qkv_BLC.contiguous(),
        grad_BLC.contiguous(),
        width // heads,
        _padded(tokens),
    )
    grad_qkv, sums = (
        torch.empty_like(qkv_BLC),
        qkv_BLC.new_empty(batch, 3 * width, dtype=torch.float32),
    )
    keys, warps = (min(padded, 32), 4) if padded <= 64 else (64, 8)
    left = tokens % keys
    _attention_backward[(batch * heads,)](
        qkv_BLC, out_BLC, grad_BLC, log_sums, grad_qkv, sums, tokens, tokens - left, size**-0.5, heads, size, padded,
        keys, _padded(left) if left else 0, causal, num_warps=warps,
    )  # fmt: skip
    return grad_qkv, sums


@attention_backward.register_fake
def _(
    grad_BLC: Tensor, qkv_BLC: Tensor, out_BLC: Tensor, log_sums: Tensor, heads: int, causal: bool
) -> tuple[Tensor, Tensor]:
    return qkv_BLC.new_empty(qkv_BLC.shape), qkv_BLC.new_empty(
        qkv_BLC.shape[0], qkv_BLC.shape[2], dtype=torch.float32
    )


@torch.library.custom_op("lapclip::gelu", mutates_args=())
def gelu_forward(x: Tensor) -> Tensor:
    """GELU."""
    x, columns = x.contiguous(), x.shape[-1]
    out, rows = torch.empty_like(x), x.numel() // columns
    _gelu_forward[triton.cdiv(rows, GELU_ROWS), triton.cdiv(columns, GELU_COLUMNS)](
        x, out, rows, columns, GELU_ROWS, GELU_COLUMNS, num_warps=4
    )  # fmt: skip
    return out


@gelu_forward.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lapclip::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of what GELU was given, and its sums over blocks of rows."""
    grad, x, columns = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = x.numel() // columns
    blocks = triton.cdiv(rows, GELU_BACKWARD_ROWS)
    grad_x, sums = torch.empty_like(x), x.new_empty(blocks, columns, dtype=torch.float32)
    _gelu_backward[blocks, triton.cdiv(columns, GELU_COLUMNS)](
        x, grad, grad_x, sums, rows, columns, GELU_BACKWARD_ROWS, GELU_COLUMNS, GELU_STEP, GELU_STAGES, num_warps=4
    )  # fmt: skip
    return grad_x, sums


@gelu_backward.register_fake
def _(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = -(-(x.numel() // x.shape[-1]) // GELU_BACKWARD_ROWS)
    return x.new_empty(x.shape), x.new_empty(blocks, x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("lapclip::norm", mutates_args=())
def norm_forward(
    x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm, the means of its rows, and the inverse of their standard deviations."""
    x, columns = x.contiguous(), x.shape[-1]
    rows = x.numel() // columns
    out, mean, inverse = (
        torch.empty_like(x),
        *(x.new_empty(rows, dtype=torch.float32) for _ in range(2)),
    )
    _norm_forward[(triton.cdiv(rows, NORM_ROWS),)](
        x, weight_C, bias_C, out, mean, inverse, rows, columns, epsilon, triton.next_power_of_2(columns), NORM_ROWS,
        num_warps=4,
    )  # fmt: skip
    return out, mean, inverse


@norm_forward.register_fake
def _(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, inverse = (x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, inverse


@torch.library.custom_op("lapclip::norm_backward", mutates_args=())
def norm_backward(
    grad: Tensor, residual: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of what a norm was given and of the residual, together; and the sums that each program has of the
    gradients of its weight, of its bias, and of the residual."""
    grad, residual, x, columns = (
        grad.contiguous(),
        residual.contiguous(),
        x.contiguous(),
        x.shape[-1],
    )
    rows = x.numel() // columns
    programs = max(1, min(rows, NORM_PROGRAMS))
    grad_x, sums = torch.empty_like(x), x.new_empty(programs, 3, columns, dtype=torch.float32)
    _norm_backward[(programs,)](
        x, grad, residual, mean, inverse, weight_C, grad_x, sums, rows, triton.cdiv(rows, programs), columns,
        triton.next_power_of_2(columns), NORM_STAGES, num_warps=4,
    )  # fmt: skip
    return grad_x, sums


@norm_backward.register_fake
def _(
    grad: Tensor, residual: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    programs = max(1, min(x.numel() // x.shape[-1], NORM_PROGRAMS))
    return x.new_empty(x.shape), x.new_empty(programs, 3, x.shape[-1], dtype=torch.float32)


class ShortAttention(torch.autograd.Function):
    """Multi-head self-attention of queries, keys and values, (B, L, 3 H D).

    The bias is that of their projection, which has been added already: its gradient is taken here.
    """

    @staticmethod
    def forward(ctx, qkv_BLC: Tensor, bias_C: Tensor | None, heads: int, causal: bool) -> Tensor:
        out, log_sums = attention_forward(qkv_BLC, heads, causal)
        ctx.save_for_backward(qkv_BLC, out, log_sums)
        ctx.heads, ctx.causal, ctx.bias_dtype = (
            heads,
            causal,
            None if bias_C is None else bias_C.dtype,
        )
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        qkv_BLC, out, log_sums = ctx.saved_tensors
        grad_qkv, sums = attention_backward(grad, qkv_BLC, out, log_sums, ctx.heads, ctx.causal)
        return (
            grad_qkv,
            sums.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


class Gelu(torch.autograd.Function):
    """GELU of a layer's result. The bias is the layer's, which has been added already: its gradient is taken here."""

    @staticmethod
    def forward(ctx, x: Tensor, bias_C: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias_dtype = bias_C.dtype
        return gelu_forward(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        grad_x, sums = gelu_backward(grad, x)
        return grad_x, sums.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None


class Norm(torch.autograd.Function):
    """A layer norm that leads into a branch, and its input again: the residual that the branch is added to.

    The gradient of the residual is that of the branch's result too, so the gradient of the branch's last bias, which is
    added without one, is taken here.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        branch_bias_C: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # a compiler computes it together with the sum that x is
            normed, mean, inverse = torch.native_layer_norm(
                x.float(), weight_C.shape, weight_C.float(), bias_C.float(), epsilon
            )
            normed = normed.to(x.dtype)
        else:
            normed, mean, inverse = norm_forward(x, weight_C, bias_C, epsilon)
        ctx.save_for_backward(x, mean, inverse, weight_C)
        ctx.bias_dtype, ctx.branch_dtype = (
            bias_C.dtype,
            None if branch_bias_C is None else branch_bias_C.dtype,
        )
        return normed, x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor, residual: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, inverse, weight_C = ctx.saved_tensors
        grad_x, sums = norm_backward(grad, residual, x, mean, inverse, weight_C)
        of_weight, of_bias, of_branch = sums.sum(0).unbind(0)
        _, weight, bias, branch, _ = ctx.needs_input_grad
        return (
            grad_x,
            of_weight.to(weight_C.dtype) if weight else None,
            of_bias.to(ctx.bias_dtype) if bias else None,
            of_branch.to(ctx.branch_dtype) if branch else None,
            None,
        )

"""Short checks that a device computes what it should, because accelerators have been silently wrong.

Each check computes an operation of training on the device, forward and backward, and compares it with the formula
written out in float64 on the CPU, from the same rounded numbers. It takes a few seconds, once for each release of torch
and of the system; what was found is remembered. `machine/device.py` decides what follows from it.

Shapes: B batch, H heads, L tokens, D width.

Why, on MPS alone: attention wrong for permuted inputs (pytorch issues 163597, 181133), `is_causal` that leaks later
tokens in half precision (195910), a fused Adam that ignores found_inf (186360).
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.errors import first_line
from lapclip.machine.adamw import AdamW
from lapclip.paths import CacheFile

CACHE = CacheFile("canary.json")
VERSION = 2
"""Rises when the checks change, so that they are made again."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""How far a result may be from the formula, relative to its norm. Rounding alone stays below half of it."""

PRECISIONS = tuple(str(dtype).removeprefix("torch.") for dtype in TOLERANCE)

BATCH, HEADS, LENGTH, SIZE = 3, 4, 24, 32

Run = Callable[..., Iterable[Any]]
"""Gives back what a function makes of each of some things, in their order, as `map` does."""
Answer = tuple[list[Tensor], list[Tensor]]
"""What the device computed, and what is right."""


@dataclass(frozen=True)
class Result:
    """How one check ended."""

    name: str
    """The operation, the precision, and `gradients` where they were computed too."""
    ok: bool
    error: float | None
    """Distance from what is right, relative to its norm; None where there is no number."""
    tolerance: float
    note: str = ""
    """The error of an operation that does not run there."""

    @property
    def operation(self) -> str:
        return self.name.split(",")[0]

    @property
    def precision(self) -> str:
        return self.name.split(", ")[1]

    def sentence(self) -> str:
        """The result as a sentence."""
        if self.note:
            return f"{self.name}: does not run ({self.note})"
        off = "no number" if self.error is None else f"off by {self.error:.1e}"
        return f"{self.name}: {off}, tolerance {self.tolerance:.0e}"


def examine(device: torch.device, precision: str, run: Run = map) -> list[Result]:
    """Every check on one device in one precision."""
    dtype = getattr(torch, precision)
    return list(run(lambda check: _judged(check[0], dtype, check[1]), list(checks(device, dtype))))


def consult(device: torch.device, label: str, precision: str, run: Run = map) -> list[Result]:
    """What is known of a device in a precision, with this torch and this system; examined now where nothing is. `run`
    may make several checks at once."""
    key = f"{device.type} {label}, {precision}, torch {torch.__version__}, {platform.platform()}, checks {VERSION}"
    with suppress(TypeError):  # another release wrote other fields, or nothing is known
        return [Result(**known) for known in CACHE.read(key)]
    results = examine(device, precision, run)
    CACHE.write(key, [asdict(result) for result in results])
    return results


def _judged(name: str, dtype: torch.dtype, check: Callable[[], Answer]) -> Result:
    tolerance = TOLERANCE[dtype]
    try:
        got, right = check()
        error = max(_distance(one, other) for one, other in zip(got, right, strict=True))
    except Exception as fault:  # a library's own error: the device cannot do it
        return Result(name, False, None, tolerance, first_line(fault))
    return Result(name, error <= tolerance, error if math.isfinite(error) else None, tolerance)


def _distance(got: Tensor, right: Tensor) -> float:
    """Relative to the norm; infinite where something is not a number."""
    distance = ((got.detach().cpu().double() - right).norm() / right.norm().clamp(min=1e-12)).item()
    return distance if math.isfinite(distance) else math.inf


def checks(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """Every check in one precision: its name, and what computes both sides of it."""
    precision = str(dtype).removeprefix("torch.")
    for gradients in (False, True):
        ending = f"{precision}, gradients" if gradients else precision
        for name, form in ATTENTIONS.items():
            yield f"{name}, {ending}", partial(_attention, device, dtype, form, gradients)
        yield (
            f"one query without keys, {ending}",
            partial(_one_query_without_keys, device, dtype, gradients),
        )
        yield f"layer norm, {ending}", partial(_layer_norm, device, dtype, gradients)
        yield f"gelu, {ending}", partial(_gelu, device, dtype, gradients)
    yield f"embedding, {precision}, gradients", partial(_embedding, device, dtype)
    if dtype == torch.float32:  # the optimiser's and the images' only precision
        yield f"crops, {precision}", partial(_crops, device)
        yield f"interpolate, {precision}", partial(_interpolate, device)
        yield f"adamw, {precision}", partial(_adamw, device, fused=False)
        yield f"fused adamw, {precision}", partial(_adamw, device, fused=True)
        yield (
            f"fused adamw with an overflow, {precision}",
            partial(_adamw, device, fused=True, overflow=True),
        )
    else:
        yield f"scaled gradients, {precision}, gradients", partial(_scaled_gradients, device, dtype)


def _numbers(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers everywhere, already rounded."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=draw).to(dtype)


def _with_gradients(
    device: torch.device,
    inputs: list[Tensor],
    device_form: Callable,
    formula: Callable,
    *,
    gradients: bool,
) -> Answer:
    """An operation on the device in the precision of its inputs, and its formula in float64 on the CPU."""
    answers = []
    for form, there, precision in (
        (device_form, device, None),
        (formula, torch.device("cpu"), torch.float64),
    ):
        leaves = [
            part.to(there, precision or part.dtype).detach().requires_grad_(gradients)
            for part in inputs
        ]
        with torch.set_grad_enabled(gradients):
            result = form(*leaves)
        if gradients:
            weights = _numbers("weights", *result.shape, dtype=inputs[0].dtype)
            result.backward(weights.to(result.device, result.dtype))
        answers.append([result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return answers[0], answers[1]


@dataclass(frozen=True)
class AttentionForm:
    """How queries, keys and values are laid out, and what a query may see."""

    permuted: bool = False
    causal: bool = False
    masked: bool = False
    one_query: bool = False


ATTENTIONS = {
    "attention": AttentionForm(),
    "permuted attention": AttentionForm(permuted=True),
    "causal attention": AttentionForm(causal=True),
    "masked attention": AttentionForm(masked=True),
    "attention of one query": AttentionForm(masked=True, one_query=True),
}


def _attention(
    device: torch.device, dtype: torch.dtype, form: AttentionForm, gradients: bool
) -> Answer:
    """As the towers use it: fused queries, keys and values (B, L, 3 H D), split into heads."""
    qkv = _numbers("qkv", BATCH, LENGTH, 3 * HEADS * SIZE, dtype=dtype)
    # One row for each query, True for the keys it may see; a lone query of a sequence sees those up to its position.
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if form.one_query:
        visible = visible[[LENGTH - 1, LENGTH // 2, 0]][:, None, None, :]

    def parts(qkv: Tensor) -> list[Tensor]:
        split = [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]
        split[0] = split[0][:, :, -1:] if form.one_query else split[0]
        return split if form.permuted else [part.contiguous() for part in split]

    def on_device(qkv: Tensor) -> Tensor:
        mask = visible.to(qkv.device) if form.masked else None
        return F.scaled_dot_product_attention(*parts(qkv), attn_mask=mask, is_causal=form.causal)

    def formula(qkv: Tensor) -> Tensor:
        query, key, value = parts(qkv)
        scores = query @ key.mT / SIZE**0.5
        hidden = ~visible if form.masked or form.causal else torch.zeros((), dtype=torch.bool)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value

    return _with_gradients(device, [qkv], on_device, formula, gradients=gradients)


def _one_query_without_keys(device: torch.device, dtype: torch.dtype, gradients: bool) -> Answer:
    """As the last block of a tower has it (`model/kernels.py`): batched products of views that do not lie in order."""
    width = HEADS * SIZE
    shapes = {"x": (BATCH, LENGTH, width), "query": (BATCH, width), "weight": (2 * width, width)}
    inputs = [_numbers(name, *shape, dtype=dtype) for name, shape in shapes.items()]
    inputs[2] = inputs[2] / SIZE  # so that a softmax of its scores is not all at one key
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[[LENGTH - 1, LENGTH // 2, 0]][
        :, None, :
    ]

    def on_device(x: Tensor, query: Tensor, weight: Tensor) -> Tensor:
        key, value = weight.unflatten(0, (2, HEADS, SIZE)).unbind(0)
        asked = torch.bmm(
            (query * SIZE**-0.5).unflatten(-1, (HEADS, SIZE)).transpose(0, 1), key
        ).transpose(0, 1)
        scores = torch.bmm(asked, x.mT).masked_fill(~visible.to(x.device), -math.inf)
        seen = torch.bmm(scores.softmax(-1), x).transpose(0, 1)
        return torch.bmm(seen, value.mT).transpose(0, 1).flatten(1)

    def formula(x: Tensor, query: Tensor, weight: Tensor) -> Tensor:
        key, value = (
            (x @ part.T).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in weight.chunk(2)
        )
        scores = query.unflatten(-1, (HEADS, SIZE))[:, :, None] @ key.mT / SIZE**0.5
        return (scores.masked_fill(~visible[:, None], -math.inf).softmax(-1) @ value).flatten(1)

    return _with_gradients(device, inputs, on_device, formula, gradients=gradients)


def _layer_norm(device: torch.device, dtype: torch.dtype, gradients: bool) -> Answer:
    width = HEADS * SIZE
    inputs = [3 * _numbers("x", BATCH, LENGTH, width, dtype=dtype) + 1]
    inputs += [_numbers(name, width, dtype=dtype) for name in ("weight", "bias")]

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    return _with_gradients(
        device,
        inputs,
        lambda x, weight, bias: F.layer_norm(x, (width,), weight, bias),
        formula,
        gradients=gradients,
    )


def _gelu(device: torch.device, dtype: torch.dtype, gradients: bool) -> Answer:
    def formula(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    return _with_gradients(
        device,
        [_numbers("x", BATCH, LENGTH, SIZE, dtype=dtype)],
        F.gelu,
        formula,
        gradients=gradients,
    )


def _embedding(device: torch.device, dtype: torch.dtype) -> Answer:
    """Tokens that occur several times add up their gradients."""
    tokens = (torch.arange(BATCH * LENGTH) ** 2 % 7).view(BATCH, LENGTH)

    def formula(table: Tensor) -> Tensor:
        return F.one_hot(tokens, 9).double() @ table

    return _with_gradients(
        device,
        [_numbers("table", 9, SIZE, dtype=dtype)],
        lambda table: F.embedding(tokens.to(table.device), table),
        formula,
        gradients=True,
    )


def _crops(device: torch.device) -> Answer:
    """Parts of images at another size, one of them flipped, as `data/pixels.py` cuts them."""
    images = _numbers("pictures", 2, 3, 32, 32)
    maps = torch.tensor([[[0.7, 0.0, 0.1], [0.0, 0.6, -0.2]], [[-0.8, 0.0, 0.0], [0.0, 0.8, 0.2]]])

    def cut(images: Tensor) -> Tensor:
        grid = F.affine_grid(maps.to(images), [2, 3, 48, 48], align_corners=False)
        return F.avg_pool2d(
            F.grid_sample(images, grid, padding_mode="border", align_corners=False), 2
        )

    return _with_gradients(device, [images], cut, cut, gradients=False)


def _interpolate(device: torch.device) -> Answer:
    """Images made smaller, and positions of patches as `model/towers.py` resamples them."""

    def smaller(images: Tensor) -> Tensor:
        return F.interpolate(images, (12, 12), mode="bicubic", antialias=True)

    return _with_gradients(
        device, [_numbers("pictures", 2, 3, 32, 32)], smaller, smaller, gradients=False
    )


def _scaled_gradients(device: torch.device, dtype: torch.dtype) -> Answer:
    """Gradients too small for half precision survive when the loss is multiplied first."""
    scale, tiny = 2.0**12, 2.0**-12
    x, weight = (_numbers(name, 16, 16, dtype=dtype) for name in ("x", "weight"))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).to(torch.promote_types(x.dtype, torch.float32)).mean() * tiny * scale

    (got, *gradients), (right, *right_gradients) = _with_gradients(
        device, [x, weight], loss, loss, gradients=True
    )
    return [got, *(part.float() / scale for part in gradients)], [
        right,
        *(part / scale for part in right_gradients),
    ]


def _adamw(device: torch.device, *, fused: bool, overflow: bool = False) -> Answer:
    """Two updates. The fused form also divides the gradients, and leaves out an update that overflowed."""
    rate, beta1, beta2, epsilon, decay = 1e-2, 0.9, 0.98, 1e-6, 0.1
    divisor = 8.0 if fused else 1.0
    weights, gradients = (
        [_numbers("weights", 33, 7), _numbers("bias", 5)],
        [_numbers("a", 33, 7), _numbers("b", 5)],
    )
    parameters = [weight.to(device).requires_grad_() for weight in weights]
    optimizer = AdamW(
        parameters,
        lr=rate,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=decay,
        fused=fused,
        foreach=False,
    )
    if fused:  # where torch's own GradScaler puts them
        setattr(optimizer, "grad_scale", torch.tensor(divisor, device=device))  # noqa: B010
        setattr(optimizer, "found_inf", torch.tensor(float(overflow), device=device))  # noqa: B010
    right = [weight.double() for weight in weights]
    for _ in range(2):
        for at, gradient in enumerate(gradients):
            parameters[at].grad = (gradient * divisor).to(device)
            # From equal gradients the corrected means are the gradient and its square in every step.
            moved = right[at] * (1 - rate * decay) - rate * gradient.double() / (
                gradient.double().abs() + epsilon
            )
            right[at] = right[at] if overflow else moved
        optimizer.step()
    return [parameter.detach() for parameter in parameters], right

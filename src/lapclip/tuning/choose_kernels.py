"""Which form of each operation is fastest here: timed at the sizes of the run, and remembered.

Remembered, because two forms differ in the last bit: the same command run twice is to give the same losses.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapclip import __version__
from lapclip.config import AUTO, ModelConfig, TrainConfig
from lapclip.errors import ConfigError, first_line
from lapclip.machine.device import DTYPES, Device
from lapclip.measure.timing import MIN_SPEEDUP, Timer
from lapclip.model.kernels import (
    attention,
    has_onednn,
    has_triton,
    linear,
    linear_gelu,
    mlp,
    residual_norm,
)
from lapclip.paths import CacheFile

CACHE = CacheFile("kernels.json")
KERNELS = ("image_attention", "text_attention", "linear")
"""The settings of TrainConfig that say in which form something is computed."""

REVISION = 2
"""Of what is timed: choices that were made by another timing are made again."""
NEEDS = {
    "onednn": "the CPU, and a build of torch with oneDNN",
    "triton": "CUDA, Triton and half precision",
}
"""What forms need that cannot be had everywhere."""
ROUNDS = 5
SECONDS = 4.0
"""The most a comparison may take; it has two rounds at least."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}
"""How far a form may be from float32 on the CPU, relative to the norm; rounding alone stays below a third of it."""
FEW = 4
"""Pairs that show whether a form is right."""


@dataclass(frozen=True)
class Sizes:
    """What a tower sees of a pair."""

    tokens: int
    width: int
    heads: int
    hidden: int
    """Width inside the MLPs."""
    most_tokens: int
    """Those of the longest caption there may be, or of a whole image where the run drops patches."""


def choose_kernels(
    model: ModelConfig,
    train: TrainConfig,
    caption_tokens: int,
    device: Device,
    *,
    anew: bool = False,
    remember: Callable[[], bool] = lambda: True,
    seconds: float = SECONDS,
) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of TrainConfig that are "auto", decided, and the reason for each.

    `anew` ignores earlier timings; `remember` is asked before the first of these whether they are to be stored, because
    looking for other programs takes time; each comparison takes so many seconds at most.
    """
    check_kernels(train, device)
    batch = min(train.batch_size, train.micro_batch or train.batch_size)
    all_patches = (model.image_size // model.patch) ** 2
    patches = max(1, round(all_patches * (1 - train.patch_dropout)))
    text = Sizes(
        caption_tokens, model.text_width, model.text_heads, model.text_hidden, model.context
    )
    image = Sizes(
        model.class_tokens + patches,
        model.image_width,
        model.image_heads,
        model.image_hidden,
        model.class_tokens + all_patches,
    )
    if model.image_tower == "convolutions":
        image = text  # it has neither attention nor large linear layers, so the text tower decides
    causal = model.architecture == "clip"
    operations = {
        "image_attention": _attention(image, causal=False),
        "text_attention": _attention(text, causal=causal),
        "linear": _linear(
            (image, text), all_layers="onednn" in forms_here("linear", device, train.dtype)
        ),
    }
    # A form may be other kernels for longer sequences, which the run meets later.
    longest = {
        "image_attention": _attention(replace(image, tokens=image.most_tokens), causal=False),
        "text_attention": _attention(replace(text, tokens=text.most_tokens), causal=causal),
    }
    choices, reasons, stored = {}, {}, None
    for name, operation in operations.items():
        forms = forms_here(name, device, train.dtype)
        if getattr(train, name) != AUTO:
            choice = getattr(train, name), "asked for"
        elif len(forms) == 1:
            choice = forms[0], "the only form here"
        else:
            sizes = f"{batch} {image} {text} {train.dtype} {torch.get_num_threads()}"
            key = f"{name} {forms} {sizes} {device.key} lapclip {__version__} {REVISION}"
            choice = None if anew else _remembered(key, forms)
            if choice is None:
                stored = remember() if stored is None else stored
                choice = _fastest(
                    operation, batch, forms, train.dtype, device, seconds, longest.get(name)
                )
                if stored:
                    CACHE.write(key, choice)
        choices[name], reasons[f"train.{name}"] = choice
    return choices, reasons


def forms_here(name: str, device: Device, dtype: str) -> tuple[str, ...]:
    """The forms that can be had here of what a setting is about, torch's own first."""
    forms = ("torch",) if name == "linear" else ("fused", "products")
    if name == "linear" and has_onednn(device.torch, DTYPES[dtype]):
        forms = (*forms, "onednn")
    return (*forms, "triton") if has_triton(device.torch, DTYPES[dtype]) else forms


def check_kernels(train: TrainConfig, device: Device) -> None:
    """Refuse what was asked for and cannot be had here."""
    for name in KERNELS:
        asked = getattr(train, name)
        if asked != AUTO and asked not in forms_here(name, device, train.dtype):
            raise ConfigError(
                f"train.{name} {asked} cannot be had on {device.kind} in {train.dtype}: it needs {NEEDS[asked]}.",
                hint=f"--set train.{name}=auto",
            )


Run = Callable[[str], list[Tensor]]
"""Computes one form of an operation and gives back its result and gradients."""
Operation = Callable[[int, torch.device, torch.dtype], Run]
"""An operation for so many pairs, on a device, in a precision, always from the same numbers."""


def _attention(sizes: Sizes, *, causal: bool) -> Operation:
    def make(batch: int, device: torch.device, dtype: torch.dtype) -> Run:
        qkv_BLD, grad_BLD = (
            _numbers((batch, sizes.tokens, width), device, dtype)
            for width in (3 * sizes.width, sizes.width)
        )
        bias_D = torch.zeros(3 * sizes.width, device=device, dtype=dtype, requires_grad=True)

        def run(form: str) -> list[Tensor]:
            qkv_BLD.grad = bias_D.grad = (
                None  # as a step does; adding to an old gradient would be timed too
            )
            y_BLD = attention(qkv_BLD, sizes.heads, form, causal=causal, bias=bias_D)
            y_BLD.backward(grad_BLD.detach())
            if (
                bias_D.grad is None and qkv_BLD.grad is not None
            ):  # what the projection has to do for the other forms
                bias_D.grad = qkv_BLD.grad.sum((0, 1))
            return _results(y_BLD, qkv_BLD, bias_D)

        return run

    return make


def _linear(towers: tuple[Sizes, ...], *, all_layers: bool) -> Operation:
    """The layers of a block, or what lies between their products alone, where forms differ in nothing else: products
    would hide the difference."""

    def make(batch: int, device: torch.device, dtype: torch.dtype) -> Run:
        layers: list[tuple[Callable[..., Tensor], list[Tensor]]] = []
        for sizes in towers:
            width, hidden, rows = sizes.width, sizes.hidden, (batch, sizes.tokens)
            projection = [(*rows, width), (3 * width, width), (3 * width,)]
            out = [(*rows, width), (width, width), (width,), (*rows, width)]
            inside = [(*rows, width), (hidden, width), (hidden,)]
            both = [*inside, (width, hidden), (width,), (*rows, width)]
            of_block = [(linear, projection), (_linear_added, out), (mlp, both)]
            layers += [
                (layer, [_numbers(shape, device, dtype) for shape in shapes])
                for layer, shapes in (of_block if all_layers else [(linear_gelu, inside)])
            ]
            if not all_layers:
                of_norm = [_numbers((width,), device, torch.float32) for _ in range(3)]
                layers.append((_norm_and_sum, [_numbers((*rows, width), device, dtype), *of_norm]))

        def run(form: str) -> list[Tensor]:
            results = []
            for layer, inputs in layers:
                for part in inputs:
                    part.grad = None
                y = layer(*inputs, form)
                y.backward(y.detach())
                results += _results(y, *inputs)
            return results

        return run

    return make


def _linear_added(x: Tensor, weight_OI: Tensor, bias_O: Tensor, added: Tensor, form: str) -> Tensor:
    return linear(x, weight_OI, bias_O, form, added)


def _norm_and_sum(
    x: Tensor, weight_D: Tensor, bias_D: Tensor, branch_bias_D: Tensor, form: str
) -> Tensor:
    """A norm as blocks have it, its branch being a bias alone."""
    normed, x, takes_bias_gradient = residual_norm(x, weight_D, bias_D, 1e-5, branch_bias_D, form)
    branch_bias_D = branch_bias_D if takes_bias_gradient else branch_bias_D.detach()
    return x + (
        3 * normed + branch_bias_D.to(x.dtype)
    )  # so that the gradients of norm and residual are two


def _numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()


def _results(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [y.detach(), *(part.grad for part in inputs if part.grad is not None)]


def _fastest(
    operation: Operation,
    batch: int,
    forms: tuple[str, ...],
    dtype: str,
    device: Device,
    seconds: float,
    longest: Operation | None = None,
) -> tuple[str, str]:
    """The quickest form that computes the right thing, and why.

    The first form is torch's own, and is kept unless another is clearly faster. Others count only if their results and
    gradients agree with float32 on the CPU, for a few pairs; those of the `longest` sequences too, which are not timed.
    """
    own, *others = forms
    few = min(batch, FEW)
    rejected: dict[str, str] = {}
    for checked in (operation, longest) if longest else (operation,):
        right = checked(few, torch.device("cpu"), torch.float32)(own)
        here = checked(few, device.torch, DTYPES[dtype])
        for form in others:
            try:
                error = _difference(here(form), right)
                if error > TOLERANCE[dtype]:
                    rejected[form] = f"{form} is off by {error:.1e} here"
            except Exception as error:  # a library's own error: this machine cannot do it
                rejected[form] = f"{form} does not run here ({first_line(error)})"
    good = [form for form in others if form not in rejected]
    if not good:
        return own, "; ".join(rejected.values())
    run = operation(batch, device.torch, DTYPES[dtype])
    runs: dict[str, Callable[[], object]] = {
        form: lambda form=form: run(form) for form in (own, *good)
    }
    timer = Timer(device.synchronise, ROUNDS, min_rounds=2, max_seconds=seconds, warm_up_rounds=2)
    timings = timer.time_in_turns(_recorded(runs, device))
    medians = {form: timing.median for form, timing in timings.items()}
    best = min(good, key=medians.__getitem__)
    chosen, other = (best, own) if medians[own] > MIN_SPEEDUP * medians[best] else (own, best)
    return (
        chosen,
        f"{medians[chosen] * 1e3:.1f} ms against {medians[other] * 1e3:.1f} ms {other}, timed here",
    )


def _recorded(
    runs: dict[str, Callable[[], object]], device: Device
) -> dict[str, Callable[[], object]]:
    """What replays each, where that can be had: steps are recorded or keep the device busy, so launches are not to
    count."""
    if not device.records_graphs:
        return runs
    try:
        recorder = device.graph_recorder()
        for run in runs.values():
            recorder.warm_up(run)
        return {form: recorder.record(run)[0] for form, run in runs.items()}
    except (
        Exception
    ):  # one of them cannot be recorded here: then all are timed as they are launched
        return runs


def _difference(results: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference among the results, relative to their norms; infinite where something is not a number."""
    errors = [
        ((got.cpu().double() - expected.double()).norm() / expected.double().norm()).item()
        for got, expected in zip(results, right, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)


def _remembered(key: str, forms: tuple[str, ...]) -> tuple[str, str] | None:
    match CACHE.read(key):
        case [str(form), str(reason)] if form in forms:
            return form, reason
    return None

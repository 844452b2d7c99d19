"""Choose the fastest form of each operation: a race at the sizes of the run, remembered.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lapclip.config import AUTO, ModelConfig, TrainConfig
from lapclip.errors import ConfigError
from lapclip.machine.device import DTYPES, Device
from lapclip.measure.memory import Memory, Question
from lapclip.measure.race import Candidate, RaceResult, race
from lapclip.measure.timing import Run, Timer
from lapclip.model.kernels import (
    attention,
    has_onednn,
    has_triton,
    linear,
    linear_gelu,
    mlp,
    residual_norm,
)

MEMORY = Memory("kernels.json")
KERNELS = ("image_attention", "text_attention", "linear")  # settings of TrainConfig
REQUIREMENTS = {
    "onednn": "the CPU, and a build of torch with oneDNN",
    "triton": "CUDA, Triton and half precision",
}
MAX_SECONDS = 4.0  # for each operation
# Largest difference from float32 on the CPU, relative to the norm: three times that of rounding.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}
CHECKED_PAIRS = 4

Compute = Callable[[str], list[Tensor]]
"""Computes one form of an operation, and returns its results and gradients."""
Prepare = Callable[[int, torch.device, torch.dtype], Compute]
"""Makes the inputs for so many pairs, always of the same numbers."""


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of what a tower computes for one pair."""

    tokens: int
    width: int
    heads: int
    hidden: int
    """Width inside the MLPs."""
    max_tokens: int
    """Tokens of the longest possible caption, or of an image."""


@dataclass(frozen=True)
class Operation:
    """What one setting chooses a form of."""

    prepare: Prepare
    """The sizes of most steps. They are timed."""
    prepare_longest: Prepare | None = None
    """The longest sequences. They are only checked, because a form may compute them otherwise."""


def choose_kernels(
    model: ModelConfig,
    train: TrainConfig,
    caption_tokens: int,
    device: Device,
    *,
    measure_again: bool = False,
    max_seconds: float = MAX_SECONDS,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return a form for each of `KERNELS`, and the reasons by the names of the settings.

    `measure_again` ignores what is remembered.
    """
    check_kernels(train, device)
    batch = min(train.batch_size, train.micro_batch or train.batch_size)
    image, text = find_sizes(model, caption_tokens)
    operations = list_operations(model, train, image, text, device)
    choices, reasons = {}, {}
    for setting, operation in operations.items():
        forms = forms_here(setting, device, train.dtype)
        requested = getattr(train, setting)
        if requested != AUTO:
            choices[setting], reasons[f"train.{setting}"] = requested, "asked for"
            continue
        if len(forms) == 1:
            choices[setting], reasons[f"train.{setting}"] = forms[0], "the only form here"
            continue
        details = {
            "forms": forms,
            "batch": batch,
            "sizes": f"{image} {text}",
            "dtype": train.dtype,
            "threads": torch.get_num_threads(),
        }
        question = Question(setting, [device.key], details)
        answer = None if measure_again else recall_form(question, forms)
        if answer is None:
            result = race_forms(operation, forms, batch, train.dtype, device, max_seconds)
            answer = result.winner, result.reason
            if result.busy is None:
                MEMORY.remember(question, answer)
        choices[setting], reasons[f"train.{setting}"] = answer
    return choices, reasons


def recall_form(question: Question, forms: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the remembered form and its reason."""
    match MEMORY.recall(question):
        case [str(form), str(reason)] if form in forms:
            return form, reason
    return None


def forms_here(setting: str, device: Device, dtype: str) -> tuple[str, ...]:
    """Return the forms that this device can compute, torch's own first."""
    forms = ["torch"] if setting == "linear" else ["fused", "products"]
    if setting == "linear" and has_onednn(device.torch, DTYPES[dtype]):
        forms.append("onednn")
    if has_triton(device.torch, DTYPES[dtype]):
        forms.append("triton")
    return tuple(forms)


def check_kernels(train: TrainConfig, device: Device) -> None:
    """Raise ConfigError if a requested form is not available here."""
    for setting in KERNELS:
        form = getattr(train, setting)
        if form != AUTO and form not in forms_here(setting, device, train.dtype):
            raise ConfigError(
                f"train.{setting} {form} cannot be had on {device.kind} in {train.dtype}: "
                f"it needs {REQUIREMENTS[form]}.",
                hint=f"--set train.{setting}=auto",
            )


def find_sizes(model: ModelConfig, caption_tokens: int) -> tuple[TowerSizes, TowerSizes]:
    """Return the sizes of the image tower and of the text tower."""
    text = TowerSizes(
        caption_tokens, model.text_width, model.text_heads, model.text_hidden, model.context
    )
    if model.image_tower == "convolutions":
        return text, text  # it has no attention and no large linear layers: the text tower decides
    tokens = model.class_tokens + (model.image_size // model.patch) ** 2
    image = TowerSizes(
        tokens,
        model.image_width,
        model.image_heads,
        model.image_hidden,
        tokens,
    )
    return image, text


def list_operations(
    model: ModelConfig, train: TrainConfig, image: TowerSizes, text: TowerSizes, device: Device
) -> dict[str, Operation]:
    """Return the operation that each of `KERNELS` chooses a form of."""
    is_causal = model.architecture == "clip"
    # Only oneDNN changes the products. Timing them for other forms would hide the difference.
    times_products = "onednn" in forms_here("linear", device, train.dtype)
    return {
        "image_attention": attention_operation(image, causal=False),
        "text_attention": attention_operation(text, causal=is_causal),
        "linear": Operation(partial(prepare_layers, (image, text), times_products)),
    }


def attention_operation(sizes: TowerSizes, *, causal: bool) -> Operation:
    longest = replace(sizes, tokens=sizes.max_tokens)
    return Operation(
        partial(prepare_attention, sizes, causal), partial(prepare_attention, longest, causal)
    )


def prepare_attention(
    sizes: TowerSizes, causal: bool, batch: int, device: torch.device, dtype: torch.dtype
) -> Compute:
    """Return attention with the gradients of its inputs and of the projection's bias."""
    qkv_BLD = random_tensor((batch, sizes.tokens, 3 * sizes.width), device, dtype)
    grad_BLD = random_tensor((batch, sizes.tokens, sizes.width), device, dtype).detach()
    bias_D = torch.zeros(3 * sizes.width, device=device, dtype=dtype, requires_grad=True)

    def compute(form: str) -> list[Tensor]:
        qkv_BLD.grad = bias_D.grad = None  # adding to an old gradient would be timed too
        y_BLD = attention(qkv_BLD, sizes.heads, form, causal=causal, bias=bias_D)
        y_BLD.backward(grad_BLD)
        if bias_D.grad is None and qkv_BLD.grad is not None:
            bias_D.grad = qkv_BLD.grad.sum((0, 1))  # the projection does it for the other forms
        return collect_results(y_BLD, qkv_BLD, bias_D)

    return compute


def prepare_layers(
    towers: tuple[TowerSizes, ...],
    times_products: bool,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Compute:
    """Return the linear layers of a block of each tower, or only what is between their products."""
    layers: list[tuple[Callable[..., Tensor], list[Tensor]]] = []

    def add_layer(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        layers.append((function, [random_tensor(shape, device, dtype) for shape in shapes]))

    for sizes in towers:
        width, hidden = sizes.width, sizes.hidden
        x_shape = (batch, sizes.tokens, width)
        if times_products:
            add_layer(linear, x_shape, (3 * width, width), (3 * width,))
            add_layer(linear_and_add, x_shape, (width, width), (width,), x_shape)
            add_layer(mlp, x_shape, (hidden, width), (hidden,), (width, hidden), (width,), x_shape)
        else:
            add_layer(linear_gelu, x_shape, (hidden, width), (hidden,))
            x = random_tensor(x_shape, device, dtype)
            norm_weights = [random_tensor((width,), device, torch.float32) for _ in range(3)]
            layers.append((norm_and_add, [x, *norm_weights]))

    def compute(form: str) -> list[Tensor]:
        results = []
        for layer, inputs in layers:
            for tensor in inputs:
                tensor.grad = None
            y = layer(*inputs, form)
            y.backward(y.detach())
            results += collect_results(y, *inputs)
        return results

    return compute


def linear_and_add(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor, added: Tensor, form: str
) -> Tensor:
    return linear(x, weight_OI, bias_O, form, added)


def norm_and_add(
    x: Tensor, weight_D: Tensor, bias_D: Tensor, branch_bias_D: Tensor, form: str
) -> Tensor:
    """Compute a norm as blocks do, with a branch that is only a bias."""
    normed, x, takes_bias_gradient = residual_norm(x, weight_D, bias_D, 1e-5, branch_bias_D, form)
    if not takes_bias_gradient:
        branch_bias_D = branch_bias_D.detach()
    branch = 3 * normed + branch_bias_D.to(x.dtype)  # 3: norm and residual get other gradients
    return x + branch


def random_tensor(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()


def collect_results(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
    return [y.detach(), *gradients]


def race_forms(
    operation: Operation,
    forms: tuple[str, ...],
    batch: int,
    dtype: str,
    device: Device,
    max_seconds: float = MAX_SECONDS,
) -> RaceResult:
    """Race the forms of an operation. Torch's own form, the first, needs no check."""
    pairs = min(batch, CHECKED_PAIRS)
    checked = [operation.prepare, operation.prepare_longest]
    checks = []
    for prepare in filter(None, checked):
        expected = prepare(pairs, torch.device("cpu"), torch.float32)(forms[0])
        checks.append((prepare(pairs, device.torch, DTYPES[dtype]), expected))

    def find_fault(form: str) -> str | None:
        for compute, expected in checks:
            error = largest_error(compute(form), expected)
            if error > TOLERANCES[dtype]:
                return f"is off by {error:.1e} here"
        return None

    compute = operation.prepare(batch, device.torch, DTYPES[dtype])
    candidates = [Candidate(forms[0], partial(compute, forms[0]))]
    for form in forms[1:]:
        candidates.append(Candidate(form, partial(compute, form), partial(find_fault, form)))
    timer = Timer(device.synchronise, min_rounds=2, max_seconds=max_seconds, warm_up_rounds=2)
    return race(candidates, timer, prepare=partial(record_runs, device))


def record_runs(device: Device, runs: Mapping[str, Run]) -> Mapping[str, Run]:
    """Record the runs where the device can. Steps are recorded too, so launches must not count."""
    if not device.records_graphs:
        return runs
    try:
        recorder = device.graph_recorder()
        for run in runs.values():
            recorder.warm_up(run)
        return {form: recorder.record(run)[0] for form, run in runs.items()}
    except Exception:  # one of them cannot be recorded: then all are timed as they are launched
        return runs


def largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference relative to the norm. Infinite if something is not a number."""
    errors = []
    for result, right in zip(results, expected, strict=True):
        difference = (result.cpu().double() - right.double()).norm() / right.double().norm()
        errors.append(torch.nan_to_num(difference, nan=torch.inf).item())
    return max(errors)

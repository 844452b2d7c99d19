"""Which form of each operation is fastest here: timed at the sizes of the run, and remembered.

Remembered, because two forms differ in the last bit: the same command run twice is to give the same losses.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapclip.config import AUTO, ModelConfig, TrainConfig
from lapclip.machine.devices import DTYPES, Device
from lapclip.machine.facts import cache_folder, machine_facts
from lapclip.model.kernels import ATTENTION, LINEAR, attention, has_onednn, linear

ROUNDS = 5
SECONDS = 4.0
"""The most a comparison may take; it has two rounds at least."""
WORTH = 1.03
"""How much faster than torch's own form another one has to be: less is noise."""


@dataclass(frozen=True)
class Sizes:
    """What a tower sees in one pass."""

    batch: int
    tokens: int
    width: int
    heads: int


def choose_kernels(
    model: ModelConfig, train: TrainConfig, caption_tokens: int, device: Device
) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of TrainConfig that are "auto", decided, and the reason for each."""
    batch = min(train.batch_size, train.micro_batch or train.batch_size)
    patches = max(1, round((model.image_size // model.patch) ** 2 * (1 - train.patch_dropout)))
    image = Sizes(batch, 1 + patches, model.image_width, model.image_heads)
    text = Sizes(batch, caption_tokens, model.text_width, model.text_heads)
    comparisons = {
        "image_attention": lambda: _compare_attention(image, train.dtype, device, causal=False),
        "text_attention": lambda: _compare_attention(text, train.dtype, device, causal=True),
        "linear": lambda: _compare_linear((image, text), train.dtype, device),
    }
    choices, reasons = {}, {}
    for name, compare in comparisons.items():
        if getattr(train, name) != AUTO:
            choices[name], reasons[f"train.{name}"] = getattr(train, name), "asked for"
            continue
        key = f"{name} {image} {text} {train.dtype} {device.kind} {torch.get_num_threads()} {_machine(device)}"
        choices[name], reasons[f"train.{name}"] = _remembered(key) or _remember(key, *compare())
    return choices, reasons


def _compare_attention(sizes: Sizes, dtype: str, device: Device, *, causal: bool) -> tuple[str, str]:
    place, kind = device.torch, DTYPES[dtype]
    qkv_BLD = torch.randn(sizes.batch, sizes.tokens, 3 * sizes.width, device=place, dtype=kind, requires_grad=True)
    grad_BLD = torch.randn(sizes.batch, sizes.tokens, sizes.width, device=place, dtype=kind)
    return _fastest(
        {
            form: lambda form=form: attention(qkv_BLD, sizes.heads, form, causal=causal).backward(grad_BLD)
            for form in ATTENTION
        },
        device,
    )


def _compare_linear(towers: tuple[Sizes, ...], dtype: str, device: Device) -> tuple[str, str]:
    if not has_onednn(device.torch):
        return "torch", "the only form here"
    place, kind = device.torch, DTYPES[dtype]
    layers = [
        (
            torch.randn(sizes.batch, sizes.tokens, inputs, device=place, dtype=kind, requires_grad=True),
            torch.randn(outputs, inputs, device=place, requires_grad=True),
            torch.randn(outputs, device=place, requires_grad=True),
        )
        for sizes in towers
        for inputs, outputs in (
            (sizes.width, 3 * sizes.width),
            (sizes.width, sizes.width),
            (sizes.width, 4 * sizes.width),
            (4 * sizes.width, sizes.width),
        )
    ]

    def run(form: str) -> None:
        for layer in layers:
            y = linear(*layer, form)
            y.backward(y.detach())
            for part in layer:
                part.grad = None  # as a step does; adding to an old gradient would be timed too

    return _fastest({form: lambda form=form: run(form) for form in LINEAR}, device)


def _fastest(forms: dict[str, Callable[[], None]], device: Device) -> tuple[str, str]:
    """The quickest form and why. The first one is torch's own, and is kept unless another is clearly faster."""
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    began = time.perf_counter()
    for turn in range(
        1 + ROUNDS
    ):  # the first is a warm-up; then in turns, so that a machine that drifts drifts for all
        for form, run in forms.items():
            device.synchronise()
            start = time.perf_counter()
            run()
            device.synchronise()
            if turn:
                seconds[form].append(time.perf_counter() - start)
        if turn >= 2 and time.perf_counter() - began > SECONDS:
            break
    medians = {form: statistics.median(times) for form, times in seconds.items()}
    own, *others = medians
    best = min(others, key=medians.__getitem__)
    chosen, rejected = (best, own) if medians[own] > WORTH * medians[best] else (own, best)
    return chosen, f"{medians[chosen] * 1e3:.1f} ms against {medians[rejected] * 1e3:.1f} ms {rejected}, timed here"


def _machine(device: Device) -> str:
    return f"{machine_facts()['chip']} {device.label} torch {torch.__version__}"


def _remembered(key: str) -> tuple[str, str] | None:
    try:
        form, reason = json.loads((cache_folder() / "kernels.json").read_text(encoding="utf-8"))[key]
        return str(form), str(reason)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(key: str, form: str, reason: str) -> tuple[str, str]:
    """Kept beside the other things that can be made again. Where that cannot be written, the choice still stands."""
    path = cache_folder() / "kernels.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        partial = path.with_name(f".kernels.{os.getpid()}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({**known, key: [form, reason]}, indent=1), encoding="utf-8")
        os.replace(partial, path)
    except (OSError, ValueError, TypeError):
        pass
    return form, reason

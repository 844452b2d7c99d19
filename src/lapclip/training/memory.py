"""How much memory a run needs, before any of it is taken: arithmetic from the model's shape and the settings.

What is counted is what a step holds at its fullest, at the end of the forward pass of a micro-batch:

    parameters    float32 weights
    gradients     float32; none yet in a batch that is computed whole, so they count only where they exceed what the
                  backward pass has freed by then
    optimizer     AdamW's two averages
    rounded       the copies in half precision, with their gradients
    activations   what both towers keep for the backward pass, and its largest intermediate results
    base          Python and torch themselves, or what an accelerator's libraries take

`benchmarks/memory_prediction.py` compares this with measured peaks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from lapclip.config import AUTO, ModelConfig, TrainConfig
from lapclip.errors import ConfigError
from lapclip.machine.choose_device import ACCELERATOR, device_of
from lapclip.machine.device import Device
from lapclip.model.sizes import convolution_sizes, count_weights
from lapclip.training.objectives import Objectives

CPU_BASE, ACCELERATOR_BASE = 350_000_000, 100_000_000
"""Measured on the CPU: a process that has imported torch and taken a step of a tiny model. On accelerators an estimate
of what libraries take for themselves; the driver's own part is not among what is free."""
HALF = ("bfloat16", "float16")
"""Precisions whose activations have two bytes."""
GAPS = 1.1
"""Measured: what an allocator cannot use between activations of different sizes."""
SHARE_OF_MEMORY = 0.8
"""How much of the memory that is free may be predicted to be taken by what is only tried."""
MARGIN = 1.15
"""A run is refused only if it would need this much more than there is: the prediction may be too high."""


@dataclass(frozen=True)
class MemoryParts:
    """Bytes by purpose, at the moment when a step holds most."""

    parameters: int
    gradients: int
    optimizer: int
    rounded: int
    activations: int
    base: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def predict_bytes(model: ModelConfig, train: TrainConfig, caption_tokens: int) -> MemoryParts:
    """Predict the memory of a training run on the device and in the precision that `train` names.

    "auto" counts as the CPU and as float32.
    """
    exact, products = count_weights(model)
    micro = min(train.micro_batch or train.batch_size, train.batch_size)
    half = train.dtype in HALF
    is_always_cheap = bool(train.cheap_size) and train.cheap_share == 1
    side = train.cheap_size if is_always_cheap else model.image_size
    further_crops = [other for other in Objectives(train).passes if other.tower == "image"]
    image = _image_bytes(model, train, side) * (1 + len(further_crops))
    activations = micro * (image + _text_bytes(model, train, caption_tokens))
    gradients = 4 * exact
    if micro >= train.batch_size:
        # They take the place of activations: while one tower goes back, the other's stay.
        gradients = max(0, gradients - activations // 2)
    return MemoryParts(
        parameters=4 * exact,
        gradients=gradients,
        optimizer=8 * exact,
        rounded=4 * products if half else 0,
        activations=activations,
        base=CPU_BASE if _on_cpu(train) else ACCELERATOR_BASE,
    )


def check_memory(
    model: ModelConfig, train: TrainConfig, caption_tokens: int, device: Device
) -> None:
    """Refuse what cannot fit into the memory that is free, before any of it is taken."""
    parts = predict_bytes(model, replace(train, device=device.kind), caption_tokens)
    free = device.free_bytes()
    if _still_needed(parts, device) <= MARGIN * free:
        return
    micro = min(train.micro_batch or train.batch_size, train.batch_size)
    fitting = largest_micro_batch(model, train, caption_tokens, device)
    recomputed = largest_micro_batch(model, replace(train, recompute=True), caption_tokens, device)
    if fitting:
        hint = f"--set train.micro_batch={fitting}, which gives the same result in less memory"
    elif recomputed:
        hint = f"--set train.recompute=true --set train.micro_batch={recomputed}, which gives the same result, slowly"
    else:
        hint = "a smaller model, such as --set model.name=mini"
    single = "" if fitting else ", and one pair at once does not fit either"
    raise ConfigError(
        f"{model.name} with {micro:,} pairs at once needs about {describe(parts)}; "
        f"{free / 1e9:.1f} GB are free on {device.kind}{single}.",
        hint=hint,
    )


def largest_micro_batch(
    model: ModelConfig,
    train: TrainConfig,
    caption_tokens: int,
    device: Device,
    free: int | None = None,
) -> int | None:
    """Return the most pairs at once that fit, as the batch halved again and again; None if one does not fit.

    `free` is asked of the device, unless it is given.
    """
    micro = train.batch_size
    while micro:
        tried = replace(train, micro_batch=micro, device=device.kind)
        needed = _still_needed(predict_bytes(model, tried, caption_tokens), device)
        if needed <= (device.free_bytes() if free is None else free):
            return micro
        micro //= 2
    return None


def describe(parts: MemoryParts) -> str:
    """The total, and what it is made of."""
    named = {
        "weights": parts.parameters + parts.rounded,
        "gradients": parts.gradients,
        "optimiser": parts.optimizer,
        "activations": parts.activations,
    }
    return f"{parts.total / 1e9:,.1f} GB ({', '.join(f'{name} {size / 1e9:,.1f}' for name, size in named.items())})"


def _still_needed(parts: MemoryParts, device: Device) -> int:
    """On the CPU Python and torch have their share already."""
    return parts.total - (parts.base if device.is_cpu else 0)


def _text_bytes(model: ModelConfig, train: TrainConfig, caption_tokens: int) -> int:
    return _tower_bytes(
        caption_tokens,
        model.text_width,
        model.text_layers,
        model.text_heads,
        model.text_hidden,
        train.text_attention,
        model.text_activation or model.activation,
        train,
    )


def _image_bytes(model: ModelConfig, train: TrainConfig, side: int) -> int:
    pixels = 4 * 3 * side * side
    if model.image_tower == "convolutions":
        return _convolution_bytes(model, train, side) + pixels
    patches = (side // model.patch) ** 2
    image = _tower_bytes(
        model.class_tokens + patches,
        model.image_width,
        model.image_layers,
        model.image_heads,
        model.image_hidden,
        train.image_attention,
        model.activation,
        train,
        pooled=model.architecture == "clip",
    )
    cut = (3 * model.patch**2) * patches * _size(train)  # patches, which the first product keeps
    return image + pixels + cut


def _convolution_bytes(model: ModelConfig, train: TrainConfig, side: int) -> int:
    """Each convolution keeps its result, which its norm wants, and what the activation makes of it, which the next one
    wants; the largest come once more in the backward pass."""
    results = [size.outputs * size.side**2 for size in convolution_sizes(model, side)]
    saved = 2 * sum(results)
    if train.recompute:  # the stem, what enters each block, and one block at a time
        saved = 2 * sum(results[:2]) + sum(results[2:]) // 2 + 6 * max(results[2:])
    return int(GAPS * (saved + 2 * max(results) + 3 * side * side) * _size(train))


def _tower_bytes(
    tokens: int,
    width: int,
    layers: int,
    heads: int,
    hidden: int,
    attention: str,
    activation: str,
    train: TrainConfig,
    *,
    pooled: bool = True,
) -> int:
    """What the blocks keep, and the largest results of the backward pass beside them.

    A block keeps 8 widths a token: the inputs of its two norms (1 each), of the projection of queries, keys and values
    (1), these (3), the input of the output projection (1) and of the MLP (1); and the MLP's hidden layer before its
    activation, and after it unless that is computed again. The last block runs for one token, and keeps 2: the norm's
    input and output; 4 with additions of low rank, which need keys and values. 4 counts. Where it runs for all, a head
    comes after it that keeps as much.
    """
    layers += not pooled
    hidden_kept = 1 if _recomputes_gelu(train, activation) else 2
    block = 8 * width + hidden_kept * hidden
    if _size(train) == 2 and not _on_cpu(train) and train.linear != "triton":
        block += 2 * width  # the inputs of the norms, which torch takes in float32 on accelerators
    if attention == "products":
        block += heads * tokens
    saved = (layers - 1) * width + block if train.recompute else (layers - 1) * block
    saved += 4 * width  # the last block
    # Gradients of the hidden layer before and after its activation, which may share their memory, and of its input.
    passing = width + hidden_kept * hidden
    if attention == "products":
        passing += 7 * width + 3 * heads * tokens  # gradients of queries, keys, values and weights
    embeddings = 2 * width * 4  # and the first norm, in float32
    return int(GAPS * tokens * (embeddings + (saved + passing) * _size(train)))


def _recomputes_gelu(train: TrainConfig, activation: str) -> bool:
    """Whether what GELU made is computed again backward instead of kept. A compiler decides for itself."""
    if activation != "gelu" or "compiled" in train.compile or train.device == ACCELERATOR:
        return False
    return device_of("cpu" if train.device == AUTO else train.device).recomputes_gelu


def _on_cpu(train: TrainConfig) -> bool:
    """Whether the settings name the CPU; "auto" counts as it."""
    return train.device == AUTO or (train.device != ACCELERATOR and device_of(train.device).is_cpu)


def _size(train: TrainConfig) -> int:
    """Bytes of a number that is saved for the backward pass."""
    return 2 if train.dtype in HALF else 4

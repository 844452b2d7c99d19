"""Predict the memory of a run from the model's shape and the settings.

Counted is the peak of a step, at the end of the forward pass of a micro-batch:

    parameters    float32 weights
    gradients     float32; a batch that is computed at once has none yet, so they count only as far as
                  they exceed what the backward pass has freed by then
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

# Bytes. Measured on the CPU: a process that has imported torch and taken a step of a tiny model. On
# accelerators an estimate of what libraries use; free memory does not include the driver's part.
CPU_BASE = 350_000_000
ACCELERATOR_BASE = 100_000_000
HALF = ("bfloat16", "float16")  # precisions whose activations have two bytes
GAPS = 1.1  # measured: memory that an allocator cannot use between activations of different sizes
SHARE_OF_MEMORY = 0.8  # of the free memory, for settings that are only tried
MARGIN = 1.15  # refuse a run only if it needs this much more: the prediction may be too high


@dataclass(frozen=True)
class MemoryParts:
    """Bytes by purpose, at the peak of a step."""

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
    """Raise ConfigError if a run cannot fit into the free memory, before any of it is used."""
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
    """Return the total and its parts, in words."""
    named = {
        "weights": parts.parameters + parts.rounded,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": parts.activations,
    }
    return f"{parts.total / 1e9:,.1f} GB ({', '.join(f'{name} {size / 1e9:,.1f}' for name, size in named.items())})"


def _still_needed(parts: MemoryParts, device: Device) -> int:
    """Return the bytes still to be allocated. On the CPU, Python and torch have theirs already."""
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
    cut = (3 * model.patch**2) * patches * _size(train)  # patches, which the first product saves
    return image + pixels + cut


def _convolution_bytes(model: ModelConfig, train: TrainConfig, side: int) -> int:
    """Return the bytes of a tower of convolutions.

    Each saves its result for its norm, and the activation of it for the next one. The largest are
    needed once more in the backward pass.
    """
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
    """Return the bytes that the blocks save, and the largest results of the backward pass.

    A block saves 8 widths a token: the inputs of its two norms (1 each) and of the projection of queries,
    keys and values (1), these (3), and the inputs of the output projection (1) and of the MLP (1); then
    the MLP's hidden layer before its activation, and after it unless that is computed again. The last
    block runs for one token and saves 2, the norm's input and output, or 4 with additions of low rank,
    which need keys and values; 4 are counted. If it runs for all tokens, a head follows that saves as much.
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
    """Return whether the result of GELU is computed again in the backward pass. A compiler decides itself."""
    if activation != "gelu" or "compiled" in train.compile or train.device == ACCELERATOR:
        return False
    return device_of("cpu" if train.device == AUTO else train.device).recomputes_gelu


def _on_cpu(train: TrainConfig) -> bool:
    """Return whether the settings name the CPU. "auto" counts as the CPU."""
    return train.device == AUTO or (train.device != ACCELERATOR and device_of(train.device).is_cpu)


def _size(train: TrainConfig) -> int:
    """Return the bytes of a number that is saved for the backward pass."""
    return 2 if train.dtype in HALF else 4

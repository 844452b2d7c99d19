"""Predict the memory of a run from the model's shape and the settings.

Counted is the peak of a step, at the end of the forward pass of a micro-batch:

    parameters    float32 weights     gradients     float32; a batch that is computed at once has
none yet, so they count only as far as                   they exceed what the backward pass has
freed by then     optimizer     AdamW's two averages     rounded       the copies in half precision,
with their gradients     activations   what both towers keep for the backward pass, and its largest
intermediate results     base          Python and torch themselves, or what an accelerator's
libraries take

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
    all_weights, rounded_weights = count_weights(model)
    micro = min(train.micro_batch or train.batch_size, train.batch_size)
    is_always_cheap = bool(train.cheap_size) and train.cheap_share == 1
    side = train.cheap_size if is_always_cheap else model.image_size
    further_crops = [other for other in Objectives(train).passes if other.tower == "image"]
    image_bytes = _image_bytes(model, train, side) * (1 + len(further_crops))
    activations = micro * (image_bytes + _text_bytes(model, train, caption_tokens))
    gradients = 4 * all_weights
    if micro >= train.batch_size:
        # The backward pass frees activations while it computes gradients: about half of them, those
        # of one tower, before it comes to the other.
        gradients = max(0, gradients - activations // 2)
    return MemoryParts(
        parameters=4 * all_weights,
        gradients=gradients,
        optimizer=8 * all_weights,
        rounded=4 * rounded_weights if train.dtype in HALF else 0,
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
    single = ", and one pair at once does not fit either"
    if fitting:
        single = ""
        hint = f"--set train.micro_batch={fitting}, which gives the same result in less memory"
    elif recomputed:
        hint = (
            f"--set train.recompute=true --set train.micro_batch={recomputed}, "
            "which gives the same result, slowly"
        )
    else:
        hint = "a smaller model, such as --set model.name=mini"
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
    """Return the largest micro-batch that fits, the batch halved any number of times, or None.

    `free` is the number of free bytes. Without it the device is queried.
    """
    if free is None:
        free = device.free_bytes()
    micro = train.batch_size
    while micro:
        candidate = replace(train, micro_batch=micro, device=device.kind)
        needed = _still_needed(predict_bytes(model, candidate, caption_tokens), device)
        if needed <= free:
            return micro
        micro //= 2
    return None


def describe(parts: MemoryParts) -> str:
    """Return the total and its parts, in words."""
    sizes = {
        "weights": parts.parameters + parts.rounded,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": parts.activations,
    }
    gigabytes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in sizes.items())
    return f"{parts.total / 1e9:,.1f} GB ({gigabytes})"


def _still_needed(parts: MemoryParts, device: Device) -> int:
    """Return the bytes still to be allocated. On the CPU, Python and torch have theirs already."""
    if device.is_cpu:
        return parts.total - parts.base
    return parts.total


def _text_bytes(model: ModelConfig, train: TrainConfig, caption_tokens: int) -> int:
    return _tower_bytes(
        train,
        tokens=caption_tokens,
        width=model.text_width,
        layers=model.text_layers,
        heads=model.text_heads,
        hidden=model.text_hidden,
        attention=train.text_attention,
        activation=model.text_activation or model.activation,
    )


def _image_bytes(model: ModelConfig, train: TrainConfig, side: int) -> int:
    pixels = 4 * 3 * side * side
    if model.image_tower == "convolutions":
        return _convolution_bytes(model, train, side) + pixels
    patches = (side // model.patch) ** 2
    image = _tower_bytes(
        train,
        tokens=model.class_tokens + patches,
        width=model.image_width,
        layers=model.image_layers,
        heads=model.image_heads,
        hidden=model.image_hidden,
        attention=train.image_attention,
        activation=model.activation,
        is_pooled=model.architecture == "clip",
    )
    # Patches as rows of numbers, which the first product saves for the backward pass.
    patch_rows = 3 * model.patch**2 * patches * _size(train)
    return image + pixels + patch_rows


def _convolution_bytes(model: ModelConfig, train: TrainConfig, side: int) -> int:
    """Return the bytes of a tower of convolutions.

    Each convolution saves its output for its norm, and the activation of it for the next one. The
    largest outputs are needed once more in the backward pass.
    """
    outputs = [size.outputs * size.side**2 for size in convolution_sizes(model, side)]
    saved = 2 * sum(outputs)
    if train.recompute:
        stem, blocks = outputs[:2], outputs[2:]
        # The stem, the inputs of each block, and one block at a time.
        saved = 2 * sum(stem) + sum(blocks) // 2 + 6 * max(blocks)
    pixels = 3 * side * side
    return int(GAPS * (saved + 2 * max(outputs) + pixels) * _size(train))


def _tower_bytes(
    train: TrainConfig,
    *,
    tokens: int,
    width: int,
    layers: int,
    heads: int,
    hidden: int,
    attention: str,
    activation: str,
    is_pooled: bool = True,
) -> int:
    """Return the bytes that a transformer saves, and those of its largest gradients.

    A block saves 8 widths a token: the inputs of its two norms (2), the input of the projection to
    queries, keys and values (1), its outputs (3), and the inputs of the output projection and of
    the MLP (2). It also saves the hidden layer of the MLP before its activation, and after it
    unless that is computed again. The last block runs for the pooled token only and saves the input
    and output of its norm (2), or with LoRA also keys and values (4). Counted are 4. If it runs for
    all tokens, it is counted as a block, and the 4 are those of the pooling head after it.
    """
    # All sizes are numbers a token.
    full_blocks = layers - 1 if is_pooled else layers
    hidden_copies = 1 if _recomputes_gelu(train, activation) else 2
    block = 8 * width + hidden_copies * hidden
    if _size(train) == 2 and not _on_cpu(train) and train.linear != "triton":
        block += 2 * width  # the inputs of the norms, which torch takes in float32 on accelerators
    if attention == "products":
        block += heads * tokens
    saved = full_blocks * block
    if train.recompute:
        saved = full_blocks * width + block
    saved += 4 * width  # the last block, or the pooling head
    # Gradients of the hidden layer before and after its activation, and of its input. Those of the
    # hidden layer may share memory.
    gradients = width + hidden_copies * hidden
    if attention == "products":
        gradients += 7 * width + 3 * heads * tokens  # of queries, keys, values and their products
    embeddings = 2 * width * 4  # and the output of the first norm, in float32
    return int(GAPS * tokens * (embeddings + (saved + gradients) * _size(train)))


def _recomputes_gelu(train: TrainConfig, activation: str) -> bool:
    """Return whether the result of GELU is computed again in the backward pass. A compiler decides
    itself."""
    if activation != "gelu" or "compiled" in train.compile or train.device == ACCELERATOR:
        return False
    return device_of("cpu" if train.device == AUTO else train.device).recomputes_gelu


def _on_cpu(train: TrainConfig) -> bool:
    """Return whether the settings name the CPU. "auto" counts as the CPU."""
    return train.device == AUTO or (train.device != ACCELERATOR and device_of(train.device).is_cpu)


def _size(train: TrainConfig) -> int:
    """Return the bytes of an activation."""
    return 2 if train.dtype in HALF else 4

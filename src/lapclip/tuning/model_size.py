"""How large a model is, and how fast a device computes products of its size."""

from __future__ import annotations

import math
from functools import cache

import torch

from lapclip.config import STAGES, ModelConfig
from lapclip.machine.device import DTYPES, Device
from lapclip.measure.timing import Timer
from lapclip.model import clip
from lapclip.model.clip import CLIP
from lapclip.model.kernels import has_onednn, linear
from lapclip.model.sizes import block_widths

MAX_RATE_ROWS = 2048
RATE_SECONDS = 0.2
ACCELERATOR_REPEATS = 20  # so that an accelerator is not timed by its launches


@cache
def count_parameters(shape: ModelConfig) -> int:
    """Count the parameters of a model without memory for them."""
    with torch.device("meta"):
        return clip.count_parameters(CLIP(shape))


def count_operations(shape: ModelConfig, batch: int, caption_tokens: int) -> float:
    """Return about how many operations the matrix products of a step have, forward and backward.

    A product of (m, k) and (k, n) has 2 m k n operations. The backward pass has twice as many
    products as the forward pass. Norms, softmax, GELU, the loss and the optimizer do not count.
    """
    if shape.image_tower == "convolutions":
        operations = count_convolution_operations(shape)
    else:
        patches = (shape.image_size // shape.patch) ** 2
        operations = 2 * patches * shape.image_width * 3 * shape.patch**2
        operations += count_block_operations(
            shape.class_tokens + patches,
            shape.image_width,
            shape.image_hidden,
            shape.image_layers,
        )
    operations += count_block_operations(
        caption_tokens, shape.text_width, shape.text_hidden, shape.text_layers
    )
    return 3.0 * batch * operations


def count_block_operations(tokens: int, width: int, hidden: int, layers: int) -> int:
    """Return the operations of a transformer's blocks in the forward pass.

    The last block computes only keys and values for all tokens, and the rest for the pooled one.
    """
    projections_and_mlp = 2 * tokens * (4 * width**2 + 2 * width * hidden)
    attention = 4 * tokens**2 * width
    return (layers - 1) * (projections_and_mlp + attention) + 4 * tokens * width**2


def count_convolution_operations(shape: ModelConfig) -> int:
    """Return the operations of a convolutional tower in the forward pass."""
    side, half_width = shape.image_size // 2, shape.image_width // 2
    products = 9 * side**2 * half_width * (3 + shape.image_width)  # the stem
    blocks_per_stage = shape.image_layers // STAGES
    for block, (inputs, outputs) in enumerate(block_widths(shape)):
        if block % blocks_per_stage == 0:
            side = math.ceil(side / 2)
        products += 9 * side**2 * (inputs + outputs) * outputs
    return 2 * products


def measure_product_rate(
    shape: ModelConfig, rows: int, device: Device, dtype: torch.dtype
) -> float:
    """Return about how many operations per second the model's widest products reach.

    A slice of the product is enough to tell which devices and precisions are hopeless.
    """
    width = max(shape.image_width, shape.text_width)
    hidden = max(shape.image_hidden, shape.text_hidden)
    rows = min(rows, MAX_RATE_ROWS)
    left = torch.randn(rows, width, device=device.torch, dtype=dtype)
    right = torch.randn(hidden, width, device=device.torch, dtype=dtype)
    repeats = 1 if device.is_cpu else ACCELERATOR_REPEATS
    fastest = math.inf
    for form in ("torch", "onednn") if has_onednn(device.torch) else ("torch",):

        def multiply(form: str = form) -> None:
            for _ in range(repeats):
                linear(left, right, None, form)

        timing = Timer(device.synchronise).time_until(
            multiply, lambda timing: timing.total > RATE_SECONDS
        )
        fastest = min(fastest, *timing.seconds)  # the first ones find cold caches
    return 2.0 * repeats * rows * width * hidden / fastest


def estimate_step_seconds(
    shape: ModelConfig, batch: int, caption_tokens: int, device: Device, dtype: str
) -> float:
    """Return about how long the matrix products of a step take: a step cannot be faster."""
    operations = count_operations(shape, batch, caption_tokens)
    rate = measure_product_rate(shape, batch * caption_tokens, device, DTYPES[dtype])
    return operations / rate

"""How large a model is, and how fast a device computes products of its size."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from lapclip.config import ModelConfig
from lapclip.machine.device import DTYPES, Device
from lapclip.measure.timing import Timer
from lapclip.model import clip
from lapclip.model.clip import CLIP
from lapclip.model.kernels import has_onednn, linear

MAX_RATE_ROWS = 2048
RATE_SECONDS = 0.2
ACCELERATOR_REPEATS = 20  # so that an accelerator is not timed by its launches


@cache
def count_parameters(shape: ModelConfig) -> int:
    """Count the parameters of a model without memory for them."""
    with torch.device("meta"):
        return clip.count_parameters(CLIP(shape))


@cache
def count_operations(shape: ModelConfig, batch: int, caption_tokens: int) -> float:
    """Return the operations of a step's matrix products, forward and backward.

    A product of (m, k) and (k, n) has 2 m k n operations. Norms, softmax, GELU, the loss and the
    optimizer do not count.
    """
    with torch.device("meta"):
        model = CLIP(shape)
        pixels = torch.empty(1, 3, shape.image_size, shape.image_size)
        tokens = torch.zeros(1, caption_tokens, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            embeddings = model.encode_image(pixels), model.encode_text(tokens)
            torch.cat(embeddings).sum().backward()
    return float(batch * counter.get_total_flops())


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

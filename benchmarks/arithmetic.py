"""How many multiply-adds a training step must do, and how fast this machine does products of those shapes.

Counted: every matrix product of the towers, forward once and backward twice (for the input and for the weights), as
our step does them: captions trimmed, the last block's query, projection and MLP for the pooled token alone. Not
counted: norms, softmax, GELU, the loss, the optimiser. A product of (m, k) and (k, n) counts 2 m k n operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lapclip.config import ModelConfig
from lapclip.model.kernels import has_onednn, linear

Product = tuple[int, int, int, int]
"""Matrices at once, rows, inner size, columns."""


def step_products(shape: ModelConfig, batch: int, caption_tokens: int) -> list[Product]:
    """The forward products of a step, as (matrices, m, k, n)."""
    patches = (shape.image_size // shape.patch) ** 2
    products: list[Product] = [(1, batch * patches, 3 * shape.patch**2, shape.image_width)]
    towers = (
        (shape.image_width, shape.image_layers, shape.image_heads, 1 + patches),
        (shape.text_width, shape.text_layers, shape.text_heads, caption_tokens),
    )
    for width, layers, heads, tokens in towers:
        rows, head = batch * tokens, width // heads
        for layer in range(layers):
            queries = tokens if layer < layers - 1 else 1
            products += [
                (1, rows, width, 2 * width),
                (1, batch * queries, width, width),
                (batch * heads, queries, head, tokens),
                (batch * heads, queries, tokens, head),
                (1, batch * queries, width, width),
                (1, batch * queries, width, 4 * width),
                (1, batch * queries, 4 * width, width),
            ]
        products.append((1, batch, width, shape.embedding))
    return products


def operations(products: list[Product]) -> float:
    """Operations of a step: forward, and twice that backward."""
    return 3 * sum(2.0 * matrices * m * k * n for matrices, m, k, n in products)


def best_rate(
    products: list[Product], device: torch.device, dtype: torch.dtype, synchronise: Callable[[], None]
) -> float:
    """The highest rate, in operations a second, among the step's own shapes, forward and backward.

    Products are repeated until they fill a few milliseconds, so that an accelerator is not timed by its launches.
    """
    rates = []
    for matrices, m, k, n in sorted(set(products), key=lambda p: -p[0] * p[1] * p[2] * p[3])[:6]:
        for rows, inner, columns in ((m, k, n), (m, n, k), (k, m, n)):
            left = torch.randn(matrices, rows, inner, device=device, dtype=dtype).squeeze(0)
            right = torch.randn(matrices, columns, inner, device=device, dtype=dtype).squeeze(0)
            operations = 2.0 * matrices * rows * inner * columns
            repeats = 1 if device.type == "cpu" else max(1, round(4e12 / operations))
            for multiply in _multipliers(left, device):
                seconds = []
                for _ in range(7):
                    synchronise()
                    began = time.perf_counter()
                    for _ in range(repeats):
                        multiply(left, right)
                    synchronise()
                    seconds.append((time.perf_counter() - began) / repeats)
                rates.append(operations / min(statistics.median(seconds), seconds[-1]))
    return max(rates)


def _multipliers(
    left: torch.Tensor, device: torch.device
) -> list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Every library our step may use: left times the transposed right."""
    ways: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [lambda a, b: a @ b.mT]
    if left.ndim == 2 and has_onednn(device):
        ways.append(lambda a, b: linear(a, b, None, "onednn"))
    return ways

"""How many multiply-adds a training step must do, and how fast this machine does products of those shapes.

Counted: every matrix product of the towers, forward once and backward twice (for the input and for the weights;
pixels need no gradient, so patches count once), as our step does them: captions trimmed, the last block for the pooled
token alone and without its keys and values (a SigLIP pools images after it, which costs as much as one more such
block), causal attention for the keys a query may see. Not counted: norms, softmax, GELU, the loss, the optimiser. A
product of (m, k) and (k, n) counts 2 m k n operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from lapclip.config import ModelConfig
from lapclip.machine.device import Device
from lapclip.model.kernels import has_onednn, linear
from lapclip.model.sizes import Size, convolution_sizes, last_width


class Product(NamedTuple):
    """Matrices at once, rows, inner size, columns; and how many times a step does it, forward and backward."""

    matrices: int
    m: int
    k: int
    n: int
    times: float = 3.0

    @property
    def operations(self) -> float:
        return 2.0 * self.matrices * self.m * self.k * self.n


QUICK_SECONDS = 0.2
"""How long the largest product is timed."""


def step_products(shape: ModelConfig, batch: int, caption_tokens: int) -> list[Product]:
    """The forward products of a step, as (matrices, m, k, n)."""
    return [
        product for own in tower_products(shape, batch, caption_tokens).values() for product in own
    ]


def tower_products(shape: ModelConfig, batch: int, caption_tokens: int) -> dict[str, list[Product]]:
    """The same for each tower."""
    siglip = shape.architecture == "siglip"
    seen = 1.0 if siglip else (caption_tokens + 1) / 2 / caption_tokens
    found: dict[str, list[Product]] = {"image": [], "text": []}
    text = (
        shape.text_width,
        shape.text_layers,
        shape.text_heads,
        shape.text_hidden,
        caption_tokens,
        seen,
    )
    towers = {"text": text}
    if shape.image_tower == "convolutions":
        first, *others = convolution_sizes(shape, shape.image_size)
        found["image"] = [
            _as_product(first, batch, times=2.0),
            *(_as_product(size, batch) for size in others),
        ]
        found["image"].append(Product(1, batch, last_width(shape), shape.embedding))
    else:
        patches = (shape.image_size // shape.patch) ** 2
        found["image"] = [
            Product(1, batch * patches, 3 * shape.patch**2, shape.image_width, times=2.0)
        ]
        layers, tokens = shape.image_layers + siglip, shape.class_tokens + patches
        towers["image"] = (
            shape.image_width,
            layers,
            shape.image_heads,
            shape.image_hidden,
            tokens,
            1.0,
        )
    for tower, (width, layers, heads, hidden, tokens, seen) in towers.items():
        products, rows = found[tower], batch * tokens
        for layer in range(layers):
            if layer < layers - 1:
                queries, size = batch * tokens, width // heads
                attention = [
                    Product(1, rows, width, 3 * width),
                    Product(batch * heads, tokens, size, tokens, times=3 * seen),
                    Product(batch * heads, tokens, tokens, size, times=3 * seen),
                ]
            else:  # keys and values are not computed (`one_query_attention`)
                queries = batch
                attention = [
                    *[Product(1, batch, width, width)] * 3,
                    Product(batch, heads, width, tokens),
                    Product(batch, heads, tokens, width),
                ]
            products += [
                *attention,
                Product(1, queries, width, width),
                Product(1, queries, width, hidden),
                Product(1, queries, hidden, width),
            ]
        products.append(Product(1, batch, width, shape.embedding))
    return found


def least_seconds(
    shape: ModelConfig, batch: int, caption_tokens: int, device: Device, dtype: torch.dtype
) -> float:
    """Return about what the products of a step take on a device."""
    products = step_products(shape, batch, caption_tokens)
    return operations(products) / quick_rate(products, device, dtype)


def _as_product(size: Size, batch: int, times: float = 3.0) -> Product:
    """A convolution as the product of every patch it reads with its weights."""
    return Product(1, batch * size.side**2, size.inputs * size.kernel**2, size.outputs, times)


def operations(products: list[Product]) -> float:
    """Operations of a step, forward and backward."""
    return sum(product.times * product.operations for product in products)


def quick_rate(products: list[Product], device: Device, dtype: torch.dtype) -> float:
    """About the rate of the largest product, from a slice of it: enough to tell what is hopeless."""
    product = max(products, key=lambda product: product.operations)
    rows = min(product.m, 2048)
    left = torch.randn(rows, product.k, device=device.torch, dtype=dtype)
    right = torch.randn(product.n, product.k, device=device.torch, dtype=dtype)
    repeats = 1 if device.is_cpu else 20
    best = 0.0
    for multiply in multipliers(left, device):
        ends = time.perf_counter() + QUICK_SECONDS
        while (
            best == 0 or time.perf_counter() < ends
        ):  # the first ones find cold caches and sleeping threads
            device.synchronise()
            began = time.perf_counter()
            for _ in range(repeats):
                multiply(left, right)
            device.synchronise()
            best = max(
                best, repeats * 2.0 * rows * product.k * product.n / (time.perf_counter() - began)
            )
    return best


def multipliers(
    left: torch.Tensor, device: Device
) -> list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Every library our step may use: left times the transposed right."""
    ways: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [lambda a, b: a @ b.mT]
    if left.ndim == 2 and has_onednn(device.torch):
        ways.append(lambda a, b: linear(a, b, None, "onednn"))
    return ways

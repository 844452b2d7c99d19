"""How large the parts of a model are, from its shape alone: nothing is built, and no torch is needed."""

from __future__ import annotations

from typing import NamedTuple

from lapclip.config import STAGES, ModelConfig


class Weights(NamedTuple):
    """How many numbers a part of a model learns."""

    every: int
    products: int
    """Those among them that enter products."""


def count_weights(model: ModelConfig) -> Weights:
    """Of the whole model, with the scale of its logits and their bias, where it has one."""
    towers = count_image(model), count_text(model)
    return Weights(
        sum(tower.every for tower in towers) + 1 + model.logit_bias,
        sum(one.products for one in towers),
    )


def count_image(model: ModelConfig) -> Weights:
    """Of the image tower."""
    width = model.image_width
    if model.image_tower == "convolutions":
        sizes = convolution_sizes(model, model.image_size)
        products = last_width(model) * model.embedding
        products += sum(size.outputs * size.inputs * size.kernel**2 for size in sizes)
        return Weights(products + 2 * sum(size.outputs for size in sizes), products)
    blocks, patches = (
        _blocks(width, model.image_layers, model.image_hidden),
        (model.image_size // model.patch) ** 2,
    )
    ends = (3 * model.patch**2 + model.embedding) * width
    others = (2 + patches + 4) * width
    if (
        model.architecture == "siglip"
    ):  # a head that pools by attention instead of a projection, and a bias of patches
        ends = _blocks(width, 1, model.image_hidden).products + (3 * model.patch**2 + 1) * width
        others = (patches + 1 + 4) * width
    return Weights(blocks.every + others + ends, blocks.products + ends)


def count_text(model: ModelConfig) -> Weights:
    """Of the text tower."""
    width = model.text_width
    blocks = _blocks(width, model.text_layers, model.text_hidden)
    bias = model.embedding if model.architecture == "siglip" else 0
    every = blocks.every + (model.vocabulary + model.context + 2 + model.embedding) * width + bias
    return Weights(every, blocks.products + width * model.embedding + bias)


def _blocks(width: int, layers: int, hidden: int) -> Weights:
    products = layers * (4 * width * width + 2 * width * hidden + 5 * width + hidden)
    return Weights(products + layers * 4 * width, products)


class Size(NamedTuple):
    """A convolution's channels in and out, the side of its kernel, and the side of what it gives."""

    inputs: int
    outputs: int
    kernel: int
    side: int


def last_width(shape: ModelConfig) -> int:
    """Channels that leave the last block; each stage has twice those of the one before."""
    return shape.image_width * 2 ** (STAGES - 1)


def convolution_sizes(shape: ModelConfig, side: int) -> list[Size]:
    """Every convolution of the tower, for images of that side."""
    side = -(-side // 2)
    sizes = [
        Size(3, shape.image_width // 2, 3, side),
        Size(shape.image_width // 2, shape.image_width, 3, side),
    ]
    for number, (inputs, outputs) in enumerate(block_widths(shape)):
        if number % (shape.image_layers // STAGES) == 0:
            side = -(-side // 2)
        sizes += [Size(inputs, outputs, 3, side), Size(outputs, outputs, 3, side)]
        sizes += [Size(inputs, outputs, 1, side)] * (inputs != outputs)
    return sizes


def block_widths(shape: ModelConfig) -> list[tuple[int, int]]:
    """Channels into and out of each block."""
    per_stage = shape.image_layers // STAGES
    outputs = [
        shape.image_width * 2 ** (number // per_stage) for number in range(shape.image_layers)
    ]
    return list(zip([shape.image_width, *outputs], outputs, strict=False))

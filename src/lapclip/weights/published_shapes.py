"""The shapes that published models have, so that they are called by their names.

Sizes are those of OpenCLIP's model configurations (mlfoundations/open_clip, src/open_clip/model_configs); the first
four are OpenAI's.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lapclip.config import ModelConfig


class Sizes(NamedTuple):
    """What makes a shape; the vocabulary and the context are CLIP's in all of them."""

    image_size: int
    patch: int
    image_width: int
    image_layers: int
    image_heads: int
    image_hidden: int
    text_width: int
    text_layers: int
    text_heads: int
    text_hidden: int
    embedding: int


KNOWN = {
    "ViT-B-32": Sizes(224, 32, 768, 12, 12, 3072, 512, 12, 8, 2048, 512),
    "ViT-B-16": Sizes(224, 16, 768, 12, 12, 3072, 512, 12, 8, 2048, 512),
    "ViT-L-14": Sizes(224, 14, 1024, 24, 16, 4096, 768, 12, 12, 3072, 768),
    "ViT-L-14-336": Sizes(336, 14, 1024, 24, 16, 4096, 768, 12, 12, 3072, 768),
    "ViT-H-14": Sizes(224, 14, 1280, 32, 16, 5120, 1024, 24, 16, 4096, 1024),
    "ViT-g-14": Sizes(224, 14, 1408, 40, 16, 6144, 1024, 24, 16, 4096, 1024),
    "ViT-bigG-14": Sizes(224, 14, 1664, 48, 16, 8192, 1280, 32, 20, 5120, 1280),
}
IMAGE_HEADS = {sizes.image_width: sizes.image_heads for sizes in KNOWN.values()}
TEXT_HEADS = {sizes.text_width: sizes.text_heads for sizes in KNOWN.values()}
"""Heads leave no trace in the sizes of tensors, so a file without a configuration is taken to have the usual ones."""


def name_of(shape: ModelConfig) -> str:
    """What a shape is called: its published name where it has one, else its image tower's width, blocks and patch."""
    sizes = Sizes(*(getattr(shape, field) for field in Sizes._fields))
    for name, known in KNOWN.items():
        if known == sizes:
            return name
    return f"vit-{shape.image_width}x{shape.image_layers}-{shape.patch}"


def named(shape: ModelConfig) -> ModelConfig:
    """With its own name, 0 for MLPs of the usual width, and colours as all these libraries read them."""
    shape = dataclasses.replace(
        shape,
        image_mlp=0 if shape.image_mlp == 4 * shape.image_width else shape.image_mlp,
        text_mlp=0 if shape.text_mlp == 4 * shape.text_width else shape.text_mlp,
        colours="stored",
    )
    return dataclasses.replace(shape, name=name_of(shape))

"""Named shapes. `seed` is the published 76.7 M model; `seed-as-written` is what its text describes instead."""

from __future__ import annotations

from lapclip.config import ModelConfig
from lapclip.errors import ConfigError, closest, nearest

_MINI = ModelConfig(
    name="mini",
    image_size=64,
    patch=16,
    image_width=128,
    image_layers=4,
    image_heads=4,
    text_width=128,
    text_layers=2,
    text_heads=4,
    embedding=128,
    vocabulary=33,
    context=77,
)
_TINY = ModelConfig(
    name="tiny",
    image_size=32,
    patch=8,
    image_width=64,
    image_layers=2,
    image_heads=2,
    text_width=64,
    text_layers=2,
    text_heads=2,
    embedding=64,
    vocabulary=33,
    context=77,
)
_SEED = ModelConfig(
    name="seed",
    image_size=224,
    patch=16,
    image_width=512,
    image_layers=12,
    image_heads=8,
    text_width=512,
    text_layers=12,
    text_heads=8,
    embedding=512,
    vocabulary=33,
    context=77,
)
_SEED_AS_WRITTEN = ModelConfig(
    name="seed-as-written",
    image_size=224,
    patch=16,
    image_width=768,
    image_layers=12,
    image_heads=12,
    text_width=512,
    text_layers=6,
    text_heads=8,
    embedding=512,
    vocabulary=33,
    context=77,
)
_PHOTOS = ModelConfig(
    name="photos",
    image_size=112,
    patch=16,
    image_tower="convolutions",
    image_width=48,
    image_layers=8,
    image_heads=1,
    text_width=256,
    text_layers=2,
    text_heads=4,
    embedding=256,
    vocabulary=4096,
    context=32,
)
_PHOTOS_LARGE = ModelConfig(**{**vars(_PHOTOS), "name": "photos-large", "image_width": 80})
_VIT_B_16 = ModelConfig(
    name="vit-b-16",
    image_size=224,
    patch=16,
    image_width=768,
    image_layers=12,
    image_heads=12,
    text_width=512,
    text_layers=12,
    text_heads=8,
    embedding=512,
    vocabulary=49_408,
    context=77,
)
_VIT_B_32 = ModelConfig(**{**vars(_VIT_B_16), "name": "vit-b-32", "patch": 32})

_TOWERS = ModelConfig(
    name="towers",
    image_size=224,
    patch=32,
    image_from="efficientnet-lite0",
    image_width=1280,
    image_layers=16,
    image_heads=1,
    text_from="minilm-l6",
    text_width=384,
    text_layers=6,
    text_heads=1,
    embedding=512,
    vocabulary=30_522,
    context=128,
)
"""Pretrained towers; what is not a width of ours is filled in when they are opened."""

SHAPES = {
    shape.name: shape
    for shape in (_MINI, _TINY, _PHOTOS, _PHOTOS_LARGE, _SEED, _SEED_AS_WRITTEN, _VIT_B_32, _VIT_B_16, _TOWERS)
}


def named_shape(name: str) -> ModelConfig:
    """The shape of that name."""
    if name not in SHAPES:
        raise ConfigError(
            f"Unknown model {name}. {nearest(name, SHAPES)}", hint=f"lapclip model {closest(name, SHAPES) or 'mini'}"
        )
    return SHAPES[name]

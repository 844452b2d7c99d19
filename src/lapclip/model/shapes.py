"""Named shapes. `seed` is the published 76.7 M model; `seed-as-written` is what its text describes instead."""

from __future__ import annotations

from typing import Any

from lapclip.config import ModelConfig
from lapclip.errors import ConfigError, closest, nearest

_COLUMNS = (
    "name", "image_size", "patch", "image_width", "image_layers", "image_heads", "text_width", "text_layers",
    "text_heads", "embedding", "vocabulary", "context",
)  # fmt: skip
_TABLE: tuple[tuple[Any, ...], ...] = (
    ("mini", 64, 16, 128, 4, 4, 128, 2, 4, 128, 33, 77),
    ("tiny", 32, 8, 64, 2, 2, 64, 2, 2, 64, 33, 77),
    ("photos", 112, 16, 48, 8, 1, 256, 2, 4, 256, 4096, 32),
    ("photos-large", 112, 16, 80, 8, 1, 256, 2, 4, 256, 4096, 32),
    ("seed", 224, 16, 512, 12, 8, 512, 12, 8, 512, 33, 77),
    ("seed-as-written", 224, 16, 768, 12, 12, 512, 6, 8, 512, 33, 77),
    ("vit-b-32", 224, 32, 768, 12, 12, 512, 12, 8, 512, 49_408, 77),
    ("vit-b-16", 224, 16, 768, 12, 12, 512, 12, 8, 512, 49_408, 77),
    ("vit-l-14", 224, 14, 1024, 24, 16, 768, 12, 12, 768, 49_408, 77),
    ("siglip-base-patch16-224", 224, 16, 768, 12, 12, 768, 12, 12, 768, 32_000, 64),
    ("siglip-so400m-patch14-384", 384, 14, 1152, 27, 16, 1152, 27, 16, 1152, 32_000, 64),
    ("siglip2-base-patch16-224", 224, 16, 768, 12, 12, 768, 12, 12, 768, 256_000, 64),
    ("siglip2-base-patch32-256", 256, 32, 768, 12, 12, 768, 12, 12, 768, 256_000, 64),
    ("towers", 224, 32, 1280, 16, 1, 384, 6, 1, 512, 30_522, 128),
)  # fmt: skip
SIGLIP: dict[str, Any] = {
    "architecture": "siglip",
    "activation": "gelu_tanh",
    "logit_bias": True,
    "pixel_mean": "0.5 0.5 0.5",
    "pixel_std": "0.5 0.5 0.5",
    "resize": "squash",
    "colours": "stored",
}
"""What every SigLIP is beside its sizes."""
_OTHERS: dict[str, dict[str, Any]] = {
    "photos": {"image_tower": "convolutions"},
    "photos-large": {"image_tower": "convolutions"},
    # Pretrained towers; what is not a width of ours is filled in when they are opened.
    "towers": {"image_from": "efficientnet-lite0", "text_from": "minilm-l6"},
    "siglip-base-patch16-224": SIGLIP,
    "siglip-so400m-patch14-384": {**SIGLIP, "image_mlp": 4304, "text_mlp": 4304},
    "siglip2-base-patch16-224": {**SIGLIP, "interpolation": "bilinear"},
    "siglip2-base-patch32-256": {**SIGLIP, "interpolation": "bilinear"},
}
SHAPES = {
    name: ModelConfig(**dict(zip(_COLUMNS, (name, *numbers), strict=True)), **_OTHERS.get(name, {}))
    for name, *numbers in _TABLE
}


def named_shape(name: str) -> ModelConfig:
    """The shape of that name."""
    if name not in SHAPES:
        raise ConfigError(
            f"Unknown model {name}. {nearest(name, SHAPES)}",
            hint=f"lapclip model {closest(name, SHAPES) or 'mini'}",
        )
    return SHAPES[name]

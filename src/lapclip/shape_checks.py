"""Whether the parts of a model's shape fit each other, each fault with the setting that mends it."""

from __future__ import annotations

import math
from typing import Any

from lapclip.errors import ConfigError

STAGES = 4
"""A tower of convolutions has its blocks in so many stages, each of half the side and twice the width."""
CLIP_MEAN, CLIP_STD = "0.48145466 0.4578275 0.40821073", "0.26862954 0.26130258 0.27577711"
"""What CLIP takes from red, green and blue, which are 0 to 1, and what it divides them by."""


def check_shape(shape: Any) -> None:
    """Raise ConfigError where the settings of a `ModelConfig` cannot go together."""
    if shape.image_size % shape.patch and not shape.image_from:
        raise ConfigError(
            f"model.patch {shape.patch} does not divide model.image_size {shape.image_size}.",
            hint=f"--set model.image_size={max(1, shape.image_size // shape.patch) * shape.patch}",
        )
    if shape.image_tower == "convolutions" and (shape.image_layers % STAGES or shape.image_width % 2):
        raise ConfigError(
            f"A tower of convolutions has blocks in {STAGES} stages and an even width, not model.image_layers "
            f"{shape.image_layers} and model.image_width {shape.image_width}.",
            hint=f"--set model.image_layers={-(-shape.image_layers // STAGES) * STAGES} "
            f"--set model.image_width={shape.image_width + shape.image_width % 2}",
        )
    for tower in ("image", "text"):
        width, heads = getattr(shape, f"{tower}_width"), getattr(shape, f"{tower}_heads")
        if width % heads:
            fitting = max(count for count in range(1, heads + 1) if width % count == 0)
            raise ConfigError(
                f"model.{tower}_heads {heads} does not divide model.{tower}_width {width}.",
                hint=f"--set model.{tower}_heads={fitting}",
            )
    _check_colours("pixel_mean", shape.pixel_mean, CLIP_MEAN, above=-math.inf)
    _check_colours("pixel_std", shape.pixel_std, CLIP_STD, above=0.0)


def _check_colours(name: str, text: str, usual: str, *, above: float) -> None:
    """Three numbers for red, green and blue."""
    try:
        fits = len(text.split()) == 3 and all(above < float(number) < math.inf for number in text.split())
    except (ValueError, AttributeError):
        fits = False
    if not fits:
        kind = "three numbers above 0" if above == 0 else "three numbers"
        raise ConfigError(
            f"model.{name} must be {kind}, separated by spaces, not {text!r}.", hint=f'--set "model.{name}={usual}"'
        )

"""What changes over a run: the learning rate, and the size of what a step sees.

All are functions of the step alone, so that a resumed run goes on as it would have. Steps count from 1.
"""

from __future__ import annotations

import math

from lapclip.config import ModelConfig, TrainConfig


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Rises linearly over the warm-up, then falls along a cosine to zero after the last step."""
    warmup = round(config.warmup * steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def cheap_steps(steps: int, config: TrainConfig) -> int:
    """How many steps the first part of the run has, with smaller images or fewer patches."""
    return round(config.cheap_share * steps) if config.cheap_size or config.patch_dropout else 0


def is_cheap(step: int, steps: int, config: TrainConfig) -> bool:
    """Whether a step belongs to that part."""
    return step <= cheap_steps(steps, config)


def image_side(cheap: bool, config: TrainConfig, model: ModelConfig) -> int:
    """The side of the images the model sees, in pixels."""
    return config.cheap_size if cheap and config.cheap_size else model.image_size


def patches_seen(cheap: bool, config: TrainConfig, model: ModelConfig) -> tuple[int, int]:
    """How many patches each image keeps, and how many it has."""
    patches = (image_side(cheap, config, model) // model.patch) ** 2
    return max(1, round(patches * (1 - (config.patch_dropout if cheap else 0.0)))), patches

"""What changes over a run: the learning rate and the size of the images.

Both are functions of the step alone, so a resumed run continues as it would have. Steps count from 1.
"""

from __future__ import annotations

import math

from lapclip.config import ModelConfig, TrainConfig


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine to zero after the last step."""
    warmup = round(config.warmup * steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def cheap_steps(steps: int, config: TrainConfig) -> int:
    """Return how many steps the first part of the run has, whose images are smaller."""
    return round(config.cheap_share * steps) if config.cheap_size else 0


def image_side(step: int, config: TrainConfig, model: ModelConfig) -> int:
    """Return the side of the images that the model sees at a step, in pixels."""
    is_cheap = step <= cheap_steps(config.steps, config)
    return config.cheap_size if is_cheap else model.image_size

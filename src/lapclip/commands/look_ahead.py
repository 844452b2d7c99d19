"""What is looked at before a run in the background has the prompt return. No torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lapclip.commands.choose_recipe import settle_recipe
from lapclip.config import (
    AUTO,
    PHOTOS_RECIPE,
    DataConfig,
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

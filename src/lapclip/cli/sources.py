"""What commands make of the data they are given: the setting that names it, and the recipe that suits it."""

from __future__ import annotations

import json
import os

from lapclip.config import DEFAULT_RECIPE, PHOTOS_RECIPE

BUILT_IN = ("scenes", "emoji")


def recipe_for(data: str | None, recipe: str | None) -> str:
    """The recipe asked for; else the one for photos, or for the built-in scenes."""
    return recipe or (DEFAULT_RECIPE if data in (None, "scenes") else PHOTOS_RECIPE)


def source_setting(data: str | None) -> list[str]:
    """The data as a setting, with a path that still leads there from another folder, as when a run is resumed."""
    if data is None:
        return []
    source = data if data in BUILT_IN else os.path.abspath(data)
    return [f"data.source={json.dumps(source, ensure_ascii=False)}"]

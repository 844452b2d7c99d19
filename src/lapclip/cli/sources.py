"""What commands make of the data they are given: the setting that names it."""

from __future__ import annotations

import json
import os

BUILT_IN = ("scenes", "emoji")


def source_setting(data: str | None) -> list[str]:
    """The data as a setting, with a path that still leads there from another folder, as when a run is resumed."""
    if data is None:
        return []
    source = data if data in BUILT_IN else os.path.abspath(data)
    return [f"data.source={json.dumps(source, ensure_ascii=False)}"]

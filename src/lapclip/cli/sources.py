"""What commands make of the data and of the model they are given: the settings that name them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lapclip.records.runs import RUNS

BUILT_IN = ("scenes", "emoji")


def source_setting(data: str | None) -> list[str]:
    """The data as a setting, with a path that still leads there from another folder, as when a run is resumed."""
    if data is None:
        return []
    source = data if data in BUILT_IN else os.path.abspath(data)
    return [f"data.source={json.dumps(source, ensure_ascii=False)}"]


def start_setting(start: str | None) -> list[str]:
    """The model to start from as a setting: a run by its name, a path that still leads there later, or a hub's name."""
    if start is None:
        return []
    if (RUNS / start).is_dir():
        start = os.path.abspath(RUNS / start)
    elif Path(start).exists():
        start = os.path.abspath(start)
    return [f"train.start={json.dumps(start, ensure_ascii=False)}"]

"""What commands make of the data and of the model they are given: the settings that name them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lapclip.runs.folder import RUNS

BUILT_IN = ("scenes", "emoji")


def source_setting(data: str | None) -> list[str]:
    """The data as a setting, with a path that still leads there from another folder, as when a run is resumed."""
    if data is None:
        return []
    source = data if data in BUILT_IN else os.path.abspath(data)
    return [f"data.source={json.dumps(source, ensure_ascii=False)}"]


def start_setting(start: str | None) -> list[str]:
    """The model to start from as a setting."""
    return [] if start is None else [f"train.start={json.dumps(_place(start), ensure_ascii=False)}"]


def teacher_setting(teacher: str | None) -> list[str]:
    """The teacher as a setting, named as a start is; or a file of embeddings."""
    return [] if teacher is None else [f"train.teacher={json.dumps(_place(teacher), ensure_ascii=False)}"]


def _place(model: str) -> str:
    """A run by its name, a path that still leads there from another folder, or a hub's name as it is."""
    if (RUNS / model).is_dir():
        return os.path.abspath(RUNS / model)
    return os.path.abspath(model) if Path(model).exists() else model

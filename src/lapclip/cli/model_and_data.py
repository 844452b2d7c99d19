"""What commands make of the data and of the model they are given: the settings that name them."""

from __future__ import annotations

import json
import os

from lapclip.which_model import which_model


def source_setting(data: str | None) -> list[str]:
    """The data as a setting, with a path that still leads there from another folder, as when a run is resumed."""
    if data is None:
        return []
    from lapclip.data.sources import absolute  # brings numpy

    source = absolute(data)
    return [f"data.source={_quoted(source)}"]


def start_setting(start: str | None) -> list[str]:
    """The model to start from as a setting."""
    return [] if start is None else [f"train.start={_quoted(which_model(start).reference)}"]


def teacher_setting(teacher: str | None) -> list[str]:
    """The teacher as a setting: a model, or a file of embeddings."""
    if teacher is None:
        return []
    is_file = teacher.endswith(".npz")
    return [f"train.teacher={_quoted(os.path.abspath(teacher) if is_file else which_model(teacher).reference)}"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

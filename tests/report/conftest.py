"""A real run, made once, whose events tests change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapclip.runs.events import read_events

Events = list[dict[str, Any]]


@pytest.fixture
def run_with(trained: Path, here: Path, empty_cache: Path) -> Callable[..., Path]:
    """Make runs/NAME from the real run's events, as `change` leaves them. What sensors say differs between machines."""

    def make(
        change: Callable[[Events], Events] = lambda events: events, name: str = "mine"
    ) -> Path:
        folder = here / "runs" / name
        folder.mkdir(parents=True)
        shutil.copy(trained / "run.toml", folder)
        changed = change(
            [e for e in read_events(trained / "events.jsonl") if e["type"] != "sensors"]
        )
        (folder / "events.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in changed), encoding="utf-8"
        )
        return folder

    return make

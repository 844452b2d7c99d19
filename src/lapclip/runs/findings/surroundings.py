"""What stands around a run: its state, and other runs at work on the same device."""

from __future__ import annotations

from typing import Any

from lapclip.errors import RunError
from lapclip.runs.findings.registry import Surroundings
from lapclip.runs.folder import (Run, all_runs)
from lapclip.runs.event_log import read_events


def look_around(run: Run) -> Surroundings:
    """Ask the system about a run and its neighbours in this folder."""
    try:
        recipe = run.recipe
    except (RunError, KeyError):  # its events can be read all the same
        recipe = Surroundings().recipe
    state = run.state
    others = _others(run) if state == "running" else ()
    return Surroundings(run.name, recipe, state, others)


def _others(run: Run) -> tuple[str, ...]:
    """Other runs that train now where this one does; one that waits for its turn has not started."""
    mine, here = _devices(run), run.path.resolve()
    return tuple(
        other.name
        for other in all_runs()
        if other.path.resolve() != here and other.state == "running" and mine & _devices(other)
    )


def _devices(run: Run) -> set[Any]:
    """Where its towers are, or were when it started."""
    for event in read_events(run.events):
        if event["type"] == "started" and isinstance(event.get("devices"), dict):
            return set(event["devices"].values())
    return set()

"""What stands around a run: its state, and other runs at work on the same device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lapclip.errors import RunError
from lapclip.runs.event_log import read_events
from lapclip.runs.folder import Run, all_runs
from lapclip.runs.summary import Summary
from lapclip.text import number

TOO_GENTLE, USUAL_RATE, TOO_WILD = 1e-5, 5e-4, 3e-3
"""AdamW's learning rate below which small models hardly move, one that usually works, and one above which they rarely
settle."""


@dataclass(frozen=True)
class Surroundings:
    """What the events of a run cannot tell."""

    name: str = "RUN"
    recipe: str = "first-run"
    state: str = ""
    """As `Run.state` says; empty where nobody asked."""
    others: tuple[str, ...] = ()
    """Other runs that are at work on the same device now."""

    def train(self, *settings: str) -> str:
        """The command for another run with these settings changed."""
        return " ".join((f"lapclip train --recipe {self.recipe}", *(f"--set {setting}" for setting in settings)))

    def train_gentler(self, summary: Summary) -> str:
        """The command for another run with a lower learning rate, or with a usual one where it was far off."""
        rate = number(summary.setting("train", "learning_rate")) or 0.0
        return self.train(f"train.learning_rate={rate / 4 if TOO_GENTLE <= rate <= TOO_WILD else USUAL_RATE:g}")


def look_around(run: Run, state: str = "") -> Surroundings:
    """Ask the system about a run and its neighbours in this folder; for its state only where that is not known."""
    try:
        recipe = run.recipe
    except (RunError, KeyError):  # its events can be read all the same
        recipe = Surroundings().recipe
    state = state or run.state
    others = _others(run) if state == "running" else ()
    return Surroundings(run.name, recipe, state, others)


def _others(run: Run) -> tuple[str, ...]:
    """Other runs that train now where this one does; one that waits for its turn has not started."""
    mine, here = _devices(run), run.path.resolve()
    return tuple(
        other.name for other in all_runs() if other.path.resolve() != here and other.running and mine & _devices(other)
    )


def _devices(run: Run) -> set[Any]:
    """The devices that its towers started on."""
    for event in read_events(run.events):
        if event["type"] == "started" and isinstance(event.get("devices"), dict):
            return set(event["devices"].values())
    return set()

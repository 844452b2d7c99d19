"""What a finding is, how a check is written down so that the docs can list it, and what a check sees.

It sees the summary of a run and what stands around it: its state, and other runs at work on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lapclip.errors import RunError
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run, all_runs
from lapclip.runs.summary import Summary
from lapclip.runs.trend import kept_evaluation
from lapclip.suggest import (
    DRAWN,
    command,
    data_command,
    resume_command,
    source_of,
    train_command,
    tune_command,
)
from lapclip.text import number

TOO_GENTLE, USUAL_RATE, TOO_WILD = 1e-5, 5e-4, 3e-3
"""AdamW's learning rate below which small models hardly move, one that usually works, and one above which they rarely
settle."""
SEVERITIES = ("alarm", "warning", "note")
"""What needs a hand now, what costs quality or time, and what is good to know."""
LEAST_STEPS = 30
"""Steps before which nothing is said about learning: the first ones say more about the initial weights."""
RECENT_STEPS, RECENT_SHARE = 20, 0.1
"""The latest steps that a number is taken from: at least so many, and this share of a long run."""


@dataclass(frozen=True)
class Surroundings:
    """What the events of a run cannot tell."""

    name: str = "RUN"
    """What a command calls the run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The contents of run.toml."""
    next_name: str = ""
    """What another run like it is to be called, where the user named this one."""
    state: str = ""
    """As `Run.state` says; empty where nobody asked."""
    others: tuple[str, ...] = ()
    """Other runs that are at work on the same device now."""

    def command(self, name: str, *words: str) -> str:
        """The command of this name for the run."""
        return command(name, self.name, *words)

    def resume(self) -> str:
        """The command that goes on with the run, with as many computers as before."""
        return resume_command(self.name, self.settings)

    def train(self, *changes: str, recipe: str = "") -> str:
        """The command for another run like it with these settings changed, or with another recipe on the same data."""
        return train_command(self.settings, *changes, recipe=recipe, name=self.next_name)

    @property
    def recipe(self) -> str:
        return str(mapping(self.settings.get("run")).get("recipe", ""))

    @property
    def drawn(self) -> bool:
        """Whether it learns from images that lapclip draws."""
        return source_of(self.settings) == DRAWN

    def tune(self) -> str:
        """The command that times its settings afresh."""
        return tune_command(self.settings)

    def check_data(self) -> str:
        """Return the command that checks its images and captions, and writes a page with some of them."""
        return f"{data_command('check', self.settings)} --page pairs.html"

    def train_gentler(self, summary: Summary) -> str:
        """The command for another run with a lower learning rate, or with a usual one where it was far off."""
        rate = number(summary.setting("train", "learning_rate")) or 0.0
        return self.train(
            f"train.learning_rate={rate / 4 if TOO_GENTLE <= rate <= TOO_WILD else USUAL_RATE:g}"
        )


def surroundings_of(run: Run, state: str = "") -> Surroundings:
    """Ask the system about a run and its neighbours in this folder; for its state only where that is not known."""
    try:
        settings, next_name = run.read_settings(), run.next_name()
    except (RunError, KeyError):  # its events can be read all the same
        settings, next_name = mapping(_started(run).get("config")), ""
    state = state or run.state
    others = _others(run) if state == "running" else ()
    return Surroundings(run.typed, settings, next_name, state, others)


def _others(run: Run) -> tuple[str, ...]:
    """Other runs that train now where this one does; one that waits for its turn has not started."""
    mine, here = _devices(run), run.path.resolve()
    return tuple(
        other.name
        for other in all_runs()
        if other.path.resolve() != here and other.running and mine & _devices(other)
    )


def _devices(run: Run) -> set[Any]:
    """The devices that its towers started on."""
    return set(mapping(_started(run).get("devices")).values())


def _started(run: Run) -> dict[str, Any]:
    """The event that began it; empty where there is none."""
    return next((event for event in read_events(run.events) if event["type"] == "started"), {})


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run, with the numbers that show it and what to do next."""

    id: str
    severity: str
    title: str
    evidence: str
    next: str


@dataclass(frozen=True)
class Found:
    """What a check says where it finds something; the severity where it is not the usual one."""

    evidence: str
    next: str
    severity: str = ""


Examine = Callable[[Summary, Surroundings], Found | None]


@dataclass(frozen=True)
class Check:
    """One thing that is checked."""

    id: str
    severity: str
    title: str
    counts: str
    """From when on it counts as found."""
    examine: Examine


def check(id: str, severity: str, title: str, counts: str) -> Callable[[Examine], Check]:
    """Make a check of the function below."""
    return lambda examine: Check(id, severity, title, counts, examine)


def recent(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest steps."""
    return events[-max(RECENT_STEPS, round(RECENT_SHARE * len(events))) :]


def numbers(values: Iterable[Any]) -> list[float]:
    """Those values that are finite numbers."""
    return [found for value in values if (found := number(value)) is not None]


def validated(summary: Summary) -> dict[str, Any]:
    """Return the metrics of the model that is kept, on the pairs held out while training."""
    kept = kept_evaluation(summary)
    return kept["evaluation"] if kept else {}


def contrastive_loss(event: dict[str, Any]) -> float | None:
    """Return the part of a loss that can be compared with guessing: all of it if nothing else is recorded."""
    return number(event.get("contrastive_loss", event.get("loss")))


def warmup_steps(summary: Summary) -> int:
    """Steps over which the learning rate rises, as the schedule rounds them."""
    return round((number(summary.setting("train", "warmup")) or 0.0) * summary.total_steps)


def has_learnt_a_while(summary: Summary) -> bool:
    """Whether learning can be judged: enough steps, at least half of the warm-up among them."""
    return len(summary.steps) >= LEAST_STEPS and summary.step >= warmup_steps(summary) / 2

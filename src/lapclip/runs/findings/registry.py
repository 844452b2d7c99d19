"""What a finding is, and how a check is written down so that the docs can list it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lapclip.runs.event_log import mapping
from lapclip.runs.findings.surroundings import Surroundings
from lapclip.runs.summary import Summary
from lapclip.text import number

SEVERITIES = ("alarm", "warning", "note")
"""What needs a hand now, what costs quality or time, and what is good to know."""
LEAST_STEPS = 30
"""Steps before which nothing is said about learning: the first ones say more about the initial weights."""
RECENT_STEPS, RECENT_SHARE = 20, 0.1
"""The latest steps that a number is taken from: at least so many, and this share of a long run."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run, with the numbers that show it and what to do next."""

    id: str
    severity: str
    title: str
    evidence: str
    next: str


class Verdict(Enum):
    """What a check says where it finds nothing."""

    CLEAR = "looked, and all is well"
    UNKNOWN = "too early, or the numbers are not there"


@dataclass(frozen=True)
class Found:
    """What a check says where it finds something; the severity where it is not the usual one."""

    evidence: str
    next: str
    severity: str = ""


Look = Callable[[Summary, Surroundings], Found | Verdict]


@dataclass(frozen=True)
class Check:
    """One thing that is looked for."""

    id: str
    severity: str
    title: str
    counts: str
    """From when on it counts as found."""
    look: Look


def check(id: str, severity: str, title: str, counts: str) -> Callable[[Look], Check]:
    """Make a check of the function below."""
    return lambda look: Check(id, severity, title, counts, look)


def recent(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest steps."""
    return events[-max(RECENT_STEPS, round(RECENT_SHARE * len(events))) :]


def numbers(values: Iterable[Any]) -> list[float]:
    """Those values that are finite numbers."""
    return [found for value in values if (found := number(value)) is not None]


def validated(summary: Summary) -> dict[str, Any]:
    """The best metrics on the pairs that are held out while training; the finished model is scored on others."""
    best = [event for event in summary.evaluations if event.get("best")] or summary.evaluations
    return mapping(best[-1].get("evaluation")) if best else {}


def warmup_steps(summary: Summary) -> int:
    """Steps over which the learning rate rises, as the schedule rounds them."""
    return round((number(summary.setting("train", "warmup")) or 0.0) * summary.total_steps)


def has_learnt_a_while(summary: Summary) -> bool:
    """Whether learning can be judged: enough steps, at least half of the warm-up among them."""
    return len(summary.steps) >= LEAST_STEPS and summary.step >= warmup_steps(summary) / 2

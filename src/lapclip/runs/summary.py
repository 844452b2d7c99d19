"""A run as its events tell it: where it stands, how fast it goes, where time, memory and energy went.

Works from the events alone, before, during and after a run. Steps that were computed again after a crash count once:
the last event of a step number is taken. Kinds of events and fields that are not there leave gaps, never errors.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lapclip.runs.curves import (Curve, curve, windows)
from lapclip.text import number
from lapclip.runs.tower_devices import places_so_far

ENDINGS = ("finished", "stopped", "failed")
RECENT = 50
"""Steps that the remaining time is guessed from."""
LEAST_PAUSE, PAUSE = 60.0, 10
"""Seconds without an event, and times the longest of the last gaps, from which on they count as a pause."""


@dataclass(frozen=True)
class Summary:
    """What is known of a run.

    Events keep their fields and gain `elapsed`, the seconds of work until then, pauses left out, and `process`, which
    counts the processes that worked. Steps also gain `gap`: the seconds since the step before, None after a start.
    """

    started: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    sensors: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    resumes: list[dict[str, Any]] = field(default_factory=list)
    ending: dict[str, Any] = field(default_factory=dict)
    """The event that ended the run, if it has ended."""
    paused: dict[str, Any] = field(default_factory=dict)
    """The event that paused it, while nothing has happened since."""
    step: int = 0
    elapsed: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """From when to when nothing happened while a process was there: the machine slept, or the run was polite."""

    @property
    def total_steps(self) -> int:
        latest = self.resumes[-1] if self.resumes else self.started
        return int(number(latest.get("steps")) or self.setting("train", "steps") or 0)

    def setting(self, section: str, name: str) -> Any:
        """A setting of the run, or None."""
        values = self.started.get("config", {})
        return values.get(section, {}).get(name) if isinstance(values, dict) else None

    @property
    def batch_size(self) -> int:
        return int(number(self.setting("train", "batch_size")) or 0)

    @property
    def training_seconds(self) -> float:
        """As the run counted them, or as its events were written."""
        return number(self.ending.get("training_seconds")) or self.elapsed

    @property
    def pairs_per_second(self) -> float | None:
        """As the run counted them, or from the time between its latest steps, evaluations and checkpoints included."""
        counted = number(self.ending.get("pairs_per_second"))
        gaps = self._gaps()[-RECENT:]
        if counted is not None or not sum(gaps):
            return counted
        return self.batch_size * len(gaps) / sum(gaps)

    @property
    def remaining_seconds(self) -> float | None:
        """A guess from the latest steps; None where there is none to make."""
        gaps = self._gaps()[-RECENT:]
        if self.ending or not gaps:
            return None
        return max(0, self.total_steps - self.step) * sum(gaps) / len(gaps)

    @property
    def peak_memory_bytes(self) -> float | None:
        ended = number(self.ending.get("peak_memory_bytes"))
        return max((*curve(self.memory, lambda event: event.get("peak_bytes")).y, ended or 0)) or None

    @property
    def scores(self) -> dict[str, Any]:
        """Held-out scores with their split: those of the finished model, or of the best one so far."""
        if isinstance(final := self.ending.get("evaluation"), dict) and final:
            return final
        best = [event for event in self.evaluations if event.get("best")] or self.evaluations
        return {"split": best[-1].get("split"), **best[-1]["evaluation"]} if best else {}

    @property
    def places(self) -> list[dict[str, Any]]:
        """Where each tower ran, and from which step on."""
        return places_so_far((self.started, *self.fallbacks)) if self.started else []

    def speed(self) -> Curve:
        """Pairs a second over the steps, in windows; a median leaves out the pauses for evaluation.

        Steps are written down one step late, but at once before a checkpoint: one gap alone may be next to nothing.
        """
        gaps = windows(curve(self.steps, lambda event: event["gap"]), least=5)
        points = [(x, self.batch_size / gap) for x, gap in zip(gaps.x, gaps.y, strict=True) if gap > 0]
        return Curve([x for x, _ in points], [y for _, y in points])

    def phases(self) -> dict[str, float]:
        """Seconds of each phase in a typical step: medians of the measured ones, the first left out as warm-up."""
        measured = [event["seconds"] for event in self.steps if isinstance(event.get("seconds"), dict)]
        measured = measured[1:] or measured
        names = dict.fromkeys(name for seconds in measured for name in seconds)
        values = {name: [v for s in measured if (v := number(s.get(name))) is not None] for name in names}
        return {name: statistics.median(found) for name, found in values.items() if found}

    def parts(self) -> list[str]:
        """The parts of the model that have gradient norms: tower by tower, from the images or words inwards."""
        found = {part for event in self.steps for part in _norms(event)}
        return sorted(found, key=_depth)

    def gradient_map(self, most: int) -> tuple[list[float], list[list[float | None]]]:
        """Gradient norms in at most `most` windows: the last step of each, and a row of medians for each part."""
        steps = [event for event in self.steps if _norms(event)]
        size = max(1, -(-len(steps) // most))
        stretches = [steps[first : first + size] for first in range(0, len(steps), size)]
        rows = [
            [_median(number(_norms(event).get(part)) for event in stretch) for stretch in stretches]
            for part in self.parts()
        ]
        return [stretch[-1]["step"] for stretch in stretches], rows

    def joules(self) -> Curve:
        """Energy used so far, over seconds of work; empty where nothing could be measured.

        Each process counts from 0, so what it had counted at the event before is taken off. What was used across a
        pause is left out: it was not for this run.
        """
        total, x, y = 0.0, [], []
        before: dict[tuple[int, str], float] = {}
        for event in self.sensors:
            counted = event["joules"] if isinstance(event.get("joules"), dict) else {}
            known = {(event["process"], name): value for name, value in counted.items() if number(value) is not None}
            if known:
                if not event["rested"]:
                    total += sum(max(0.0, value - before.get(source, 0.0)) for source, value in known.items())
                before |= known
                x.append(event["elapsed"])
                y.append(total)
        return Curve(x, y)

    def _gaps(self) -> list[float]:
        return [event["gap"] for event in self.steps if event["gap"] is not None]


def summarise(events: Iterable[dict[str, Any]]) -> Summary:
    """Read a run's events in the order they were written."""
    by_step: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "evaluation": {}, "memory": {}}
    lists: dict[str, list[dict[str, Any]]] = {"fell_back": [], "resumed": [], "sensors": []}
    started: dict[str, Any] = {}
    ending: dict[str, Any] = {}
    paused: dict[str, Any] = {}
    elapsed, before, latest, process = 0.0, None, 0, 0
    step_before: tuple[float, float] | None = None
    rested = False
    pauses: list[tuple[float, float]] = []
    usual = _UsualGap()
    for event in events:
        kind, time, step = event["type"], number(event.get("time")), number(event.get("step"))
        if kind in ("started", "resumed"):
            before, step_before, ending = None, None, {}  # what lies between two processes is a pause, not work
            process += 1
        if time is not None:
            passed = max(0.0, time - before) if before is not None else 0.0  # a clock may be set back
            if kind == "went_on" or usual.is_pause(passed, measured=number(event.get("seconds"))):
                pauses.append((time - passed, time))
                passed, step_before, rested = 0.0, None, True
            elapsed += passed
            before = time
        known = {**event, "elapsed": elapsed, "process": process}
        if kind == "paused":
            paused = known
        elif kind in ("went_on", "started", "resumed", "step", *ENDINGS):
            paused = {}
        if kind == "started":
            started = known
        elif kind in ENDINGS:
            ending = known
        elif kind in lists:
            if kind == "sensors":
                known["rested"], rested = rested, False
            lists[kind].append(known)
            step_before = None if kind == "fell_back" else step_before  # making everything anew is no step
        elif kind in by_step and step is not None:
            if kind == "step":
                known["gap"] = None
                if step_before is not None and step > step_before[0]:  # of a long run some steps are left out
                    known["gap"] = (elapsed - step_before[1]) / (step - step_before[0])
                    usual.add(known["gap"])
                step_before = (step, elapsed)
            if kind != "evaluation" or isinstance(event.get("evaluation"), dict):
                by_step[kind][int(step)] = known
        if kind in ("step", "resumed", "fell_back", *ENDINGS) and step is not None:
            latest = int(step)
    ordered = {kind: [found[step] for step in sorted(found)] for kind, found in by_step.items()}
    return Summary(
        started=started,
        steps=ordered["step"],
        evaluations=ordered["evaluation"],
        memory=ordered["memory"],
        sensors=lists["sensors"],  # all of them: work that was lost in a crash used energy too
        fallbacks=lists["fell_back"],
        resumes=lists["resumed"],
        ending=ending,
        paused=paused,
        step=latest,
        elapsed=elapsed,
        pauses=pauses,
    )


class _UsualGap:
    """Tells a machine that slept from a step that took long."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=50)

    def add(self, gap: float) -> None:
        self._gaps.append(gap)

    def is_pause(self, passed: float, measured: float | None) -> bool:
        """Whether nothing happened for much longer than usual, and no evaluation or checkpoint says that it took it."""
        if len(self._gaps) < 3 or passed < LEAST_PAUSE or (measured or 0.0) > passed / 2:
            return False
        return passed > PAUSE * max(self._gaps)


def _norms(event: dict[str, Any]) -> dict[str, Any]:
    """Gradient norms by part; none where float16 overflowed."""
    norms = event.get("grad_norms")
    return norms if isinstance(norms, dict) else {}


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _depth(part: str) -> tuple[str, int, str]:
    """Towers in order, each from its embedding through its blocks to its head; then what belongs to neither."""
    tower, dot, place = part.partition(".")
    if not dot:
        return "~", 0, part
    depth = int(place) if place.isdigit() else {"embedding": -1}.get(place, 1_000_000)
    return tower, depth, place

"""A run at one moment: what is known of it, and that as an object for scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from lapclip.runs.curves import Curve, curve, smoothed, windows
from lapclip.runs.findings import Finding
from lapclip.runs.forecast import Forecast
from lapclip.runs.summary import Summary
from lapclip.text import number
from lapclip.watch.event_notices import Notice

WORKING = ("running", "paused", "starting", "waiting")
"""States after which more is to come."""
WATT_STRETCH = 10
"""Looks at the sensors that the power is taken from."""
TOLD_ELSEWHERE = ("died", "failed", "not-a-number", "paused", "fell-back")
"""Findings that the state of a run, or the list of what happened, says already."""
SENSED = ("celsius", "megahertz", "throttled", "swap_bytes", "reason")
ENOUGH = 800
"""Steps that a curve is drawn from."""
IN_JSON = 200
"""Points of a curve that a script gets."""


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    `state` is what `Run.state` says, or: paused, starting (no step yet), waiting (no folder yet), gone (deleted).
    """

    name: str
    state: str
    summary: Summary = field(default_factory=Summary)
    time_left: Forecast | None = None
    notices: tuple[Notice, ...] = ()
    findings: tuple[Finding, ...] = ()
    pause_reason: str | None = None
    log: str = ""
    """Where the run's own words are."""
    silent_seconds: float = 0.0
    """Since the last event, where that is unusually long."""

    @property
    def working(self) -> bool:
        return self.state in WORKING

    @property
    def alarms(self) -> list[Finding]:
        """Findings that are not told elsewhere, the gravest first."""
        return [finding for finding in self.findings if finding.id not in TOLD_ELSEWHERE]

    @property
    def progress(self) -> float:
        total = self.summary.total_steps
        return min(1.0, self.summary.step / total) if total else 0.0

    @property
    def epoch(self) -> int:
        return int(number(self.summary.steps[-1].get("epoch")) or 0) if self.summary.steps else 0

    @property
    def epochs(self) -> int:
        each = number(self.summary.started.get("steps_per_epoch"))
        return -(-self.summary.total_steps // int(each)) if each else 0

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """Enough of the steps for a small curve, the newest among them."""
        steps = self.summary.steps
        return steps[:: -max(1, len(steps) // ENOUGH)][::-1]

    @cached_property
    def loss(self) -> Curve:
        return _smooth(curve(self._steps, lambda event: event.get("loss")))

    @cached_property
    def accuracy(self) -> Curve:
        """Share of right answers in training batches, both ways."""
        return _smooth(curve(self._steps, batch_accuracy))

    @cached_property
    def temperature(self) -> Curve:
        return curve(self._steps, lambda event: event.get("temperature"))

    @cached_property
    def gradient(self) -> Curve:
        return _smooth(curve(self._steps, lambda event: event.get("grad_norm")))

    @property
    def gradient_parts(self) -> list[tuple[str, float]]:
        """Gradient norms of the parts at the last step that has them, the largest first; the temperature left out."""
        for event in reversed(self.summary.steps):
            norms = event.get("grad_norms")
            if isinstance(norms, dict) and norms:
                known = [(str(part), value) for part, v in norms.items() if (value := number(v)) is not None]
                return sorted(((p, v) for p, v in known if p != "temperature"), key=lambda item: -item[1])
        return []

    @property
    def recall(self) -> Curve:
        return curve(self.summary.evaluations, lambda event: event["evaluation"].get("t2i_r1"))

    @cached_property
    def best_evaluation(self) -> dict[str, Any] | None:
        """The evaluation whose model is kept."""
        best = [event for event in self.summary.evaluations if event.get("best")]
        return best[-1] if best else None

    @property
    def best_recall(self) -> float | None:
        """Held-out text-to-image R@1 of the best model so far."""
        return number(self.best_evaluation["evaluation"].get("t2i_r1")) if self.best_evaluation else None

    @property
    def memory(self) -> tuple[float | None, float | None, float | None]:
        """Bytes of the process, at most so far, and of the machine."""
        latest = self.summary.memory[-1] if self.summary.memory else {}
        machine = self.summary.started.get("machine")
        whole = number(machine.get("memory_bytes")) if isinstance(machine, dict) else None
        return number(latest.get("process_bytes")), self.summary.peak_memory_bytes, whole

    @property
    def sensors(self) -> dict[str, Any]:
        """The latest look at the machine."""
        return self.summary.sensors[-1] if self.summary.sensors else {}

    @property
    def core_use(self) -> list[float]:
        found = self.sensors.get("core_use")
        return [min(1.0, max(0.0, number(use) or 0.0)) for use in found] if isinstance(found, list) else []

    @cached_property
    def joules(self) -> float | None:
        used = self.summary.joules()
        return used.y[-1] if used else None

    @property
    def watts(self) -> float | None:
        """Mean power over the latest looks at the sensors."""
        used = self.summary.joules()
        points = list(zip(used.x, used.y, strict=True))[-WATT_STRETCH:]
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            return None
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])

    @property
    def devices(self) -> dict[str, str]:
        """Where each tower is now."""
        latest = self.summary.places[-1] if self.summary.places else {}
        return {tower: str(place) for tower, place in latest.items() if tower != "step"}

    @property
    def places(self) -> str:
        """Where the towers are, in words."""
        devices = self.devices
        kinds = dict.fromkeys(str(kind) for kind in devices.values())
        return " and ".join(kinds) if len(kinds) == 1 else ", ".join(f"{t} on {p}" for t, p in devices.items())

    def to_dict(self, next_commands: Callable[[Look], list[str]]) -> dict[str, Any]:
        """For scripts: shares from 0 to 1, sizes in bytes, times in seconds. What is not known is null."""
        summary, (process, peak, whole) = self.summary, self.memory
        last = summary.steps[-1] if summary.steps else {}
        return {
            "name": self.name,
            "state": self.state,
            "step": summary.step,
            "steps": summary.total_steps,
            "epoch": self.epoch,
            "epochs": self.epochs,
            "training_seconds": summary.training_seconds,
            "time_left": asdict(self.time_left) if self.time_left else None,
            "pairs_per_second": summary.pairs_per_second,
            "devices": self.devices,
            "loss": number(last.get("loss")),
            "accuracy": batch_accuracy(last),
            "temperature": number(last.get("temperature")),
            "grad_norm": number(last.get("grad_norm")),
            "grad_norms": dict(self.gradient_parts),
            "best": self.best_recall,
            "evaluation": summary.scores or None,
            "evaluations": [_evaluation(event) for event in summary.evaluations],
            "phases": summary.phases(),
            "memory": {"process_bytes": process, "peak_bytes": peak, "machine_bytes": whole},
            "sensors": {
                "core_use": self.core_use,
                "joules": self.joules,
                "watts": self.watts,
                **{name: self.sensors.get(name) for name in SENSED},
            },
            "notices": [asdict(notice) for notice in self.notices],
            "findings": [asdict(finding) for finding in self.findings],
            "curves": {
                name: {"step": points.x, "value": points.y}
                for name in ("loss", "accuracy", "temperature", "gradient", "recall")
                for points in [windows(getattr(self, name), most=IN_JSON)]
            },
            "next": next_commands(self),
        }


def batch_accuracy(event: dict[str, Any]) -> float | None:
    """Of both ways."""
    ways = [number(event.get(name)) for name in ("t2i_accuracy", "i2t_accuracy")]
    found = [way for way in ways if way is not None]
    return sum(found) / len(found) if found else None


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    recalls = {name: number(event["evaluation"].get(name)) for name in ("t2i_r1", "i2t_r1")}
    return {"step": event["step"], "epoch": event.get("epoch"), "best": bool(event.get("best")), **recalls}


def usual_gap(summary: Summary) -> float | None:
    """The longest of the last gaps between steps."""
    last = itertools.islice(reversed(summary.steps), 50)
    return max((event["gap"] for event in last if event["gap"] is not None), default=None)


def _smooth(points: Curve) -> Curve:
    return smoothed(points) if len(points) > 20 else points

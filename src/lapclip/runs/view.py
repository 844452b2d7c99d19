"""How a run stands: the view that `watch`, its page and `report` show. `lapclip runs` lists the lighter `RunStatus`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from lapclip.errors import split_hint
from lapclip.runs.curves import Curve, curve, smoothed, windows
from lapclip.runs.events import STEP_FIELDS, mapping, read_events
from lapclip.runs.findings import Finding
from lapclip.runs.folder import Run
from lapclip.runs.forecast import Forecast, forecast
from lapclip.runs.messages import NO_REASON, Notice, notices
from lapclip.runs.summary import Machines, Summary, batch_accuracy, summarise
from lapclip.runs.trend import kept_evaluation, trend_text, validation
from lapclip.text import number, one_line

WORKING = ("running", "paused", "starting")
"""States after which more is to come."""
WATT_STRETCH = 10
"""Readings of the sensors that the power is taken from."""
SHOWN_ELSEWHERE = ("died", "failed", "not-a-number", "paused", "fell-back")
"""Findings that the state of a run, or the list of what happened, says already."""
SENSED = ("celsius", "megahertz", "throttled", "swap_bytes", "reason")
ENOUGH = 800
"""Steps that a small curve is drawn from."""
IN_JSON = 200
"""Points of a curve that a script gets."""
STEP_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "accuracy": batch_accuracy,
    "gradient": lambda event: event.get("grad_norm"),
    "learning_rate": lambda event: event.get("lr"),
}
"""Curves whose values have another name in a step event, or are computed."""
STEADY = ("temperature",)
"""Values whose small curve is not smoothed, because they change slowly."""
MAX_METRICS = 12
SUMMARY_FIELDS = {"elapsed", "process", "gap"}  # added to step events by `Summary`


@dataclass(frozen=True)
class RunView:
    """A run at one moment, as its events tell it."""

    name: str
    state: str
    """What `Run.state` says, or gone (deleted)."""
    summary: Summary = field(default_factory=Summary)
    findings: tuple[Finding, ...] = ()
    silent_seconds: float = 0.0
    """Since the last event, where that is unusually long."""

    @property
    def status(self) -> str:
        """The state in more detail: a running run may be paused, or starting until its first step."""
        return self.status_of(self.state, bool(self.summary.paused), bool(self.summary.steps))

    @staticmethod
    def status_of(state: str, paused: bool, begun: bool) -> str:
        """Return the same from the few facts that a list of runs has."""
        if state == "running" and paused:
            return "paused"
        return "starting" if state == "running" and not begun else state

    @property
    def working(self) -> bool:
        return self.state in WORKING

    @property
    def error(self) -> tuple[str, str]:
        """Why a run failed, and what to try; errors of ours say both."""
        text, hint = split_hint(str(self.summary.ending.get("error") or NO_REASON))
        return one_line(text), one_line(hint)

    @property
    def pause_reason(self) -> str | None:
        """Why the run is paused now, or None if it is not."""
        return self.reason_of(self.summary.paused)

    @staticmethod
    def reason_of(paused: dict[str, Any]) -> str | None:
        """The reason that a `paused` event gives; None without an event."""
        return one_line(paused.get("reason") or NO_REASON) if paused else None

    @property
    def started(self) -> float | None:
        """When the run began, in seconds since 1970."""
        return number(self.summary.started.get("time"))

    @property
    def ended_early(self) -> bool:
        """Whether the run is finished without its last steps, because scores no longer rose."""
        return self.state == "finished" and self.summary.step < self.summary.total_steps

    @property
    def progress(self) -> float:
        """Share of the work that is done. 1 for a run that ended early."""
        total = self.summary.total_steps
        if not total:
            return 0.0
        return 1.0 if self.ended_early else min(1.0, self.summary.step / total)

    @property
    def epoch(self) -> int:
        return int(number(self.summary.steps[-1].get("epoch")) or 0) if self.summary.steps else 0

    @property
    def epochs(self) -> int:
        each = number(self.summary.started.get("steps_per_epoch"))
        return -(-self.summary.total_steps // int(each)) if each else 0

    @cached_property
    def time_left(self) -> Forecast | None:
        """How long it will still take; None where nothing is left to do, or nothing tells it yet."""
        return forecast(self.summary) if self.state in ("running", "paused") else None

    @cached_property
    def notices(self) -> tuple[Notice, ...]:
        """What happened besides learning, the newest last."""
        return tuple(notices(self.summary))

    @property
    def alarms(self) -> list[Finding]:
        """Findings that are not shown elsewhere, the gravest first."""
        return [finding for finding in self.findings if finding.id not in SHOWN_ELSEWHERE]

    @cached_property
    def loss(self) -> Curve:
        return self.step_curve("loss")

    @cached_property
    def accuracy(self) -> Curve:
        """Share of right answers in training batches, the mean of both ways."""
        return self.step_curve("accuracy")

    @cached_property
    def temperature(self) -> Curve:
        return self.step_curve("temperature")

    @cached_property
    def metrics(self) -> dict[str, str]:
        """What each further metric of the objectives is, by its name in the latest step."""
        known = STEP_FIELDS | SUMMARY_FIELDS
        names = [name for name in self.latest_step if name not in known]
        names = [name for name in names if number(self.latest_step[name]) is not None]
        meanings = mapping(self.summary.started.get("metrics"))
        return {name: one_line(meanings.get(name) or "") for name in names[:MAX_METRICS]}

    def step_curve(self, name: str) -> Curve:
        """Return the value of a name at every step."""
        return curve(self.summary.steps, _step_value(name))

    @cached_property
    def gradient(self) -> Curve:
        """The norm of all gradients."""
        return self.step_curve("gradient")

    @cached_property
    def learning_rate(self) -> Curve:
        return self.step_curve("learning_rate")

    def small_curve(self, name: str) -> Curve:
        """A curve of the steps for a small drawing: of a long run some of them, and smoothed where steps differ."""
        points = curve(self._some_steps, _step_value(name))
        return smoothed(points) if name not in STEADY and len(points) > 20 else points

    @property
    def latest_step(self) -> dict[str, Any]:
        """The newest `step` event; empty before the first."""
        return self.summary.steps[-1] if self.summary.steps else {}

    @property
    def gradient_parts(self) -> list[tuple[str, float]]:
        """Gradient norms of the towers' parts at the last step that has them, the largest first."""
        for event in reversed(self.summary.steps):
            if norms := mapping(event.get("grad_norms")):
                known = [
                    (str(part), value)
                    for part, v in norms.items()
                    if (value := number(v)) is not None
                ]
                return sorted(((p, v) for p, v in known if "." in p), key=lambda item: -item[1])
        return []

    @property
    def recall(self) -> Curve:
        """Held-out text-to-image R@1 at each evaluation."""
        return self.metric("t2i_r1")

    def metric(self, name: str) -> Curve:
        """A held-out metric at each evaluation."""
        return curve(self.summary.evaluations, lambda event: event["evaluation"].get(name))

    @cached_property
    def best_evaluation(self) -> dict[str, Any] | None:
        """The evaluation of the model that is kept."""
        return kept_evaluation(self.summary)

    @cached_property
    def trend(self) -> str:
        """Whether held-out scores still rise, in a sentence. Empty if that is not known yet."""
        found = validation(self.summary)
        return trend_text(found, is_over=not self.working) if found else ""

    @property
    def best_recall(self) -> float | None:
        """Held-out text-to-image R@1 of the best model so far."""
        return (
            number(self.best_evaluation["evaluation"].get("t2i_r1"))
            if self.best_evaluation
            else None
        )

    @cached_property
    def machines(self) -> Machines | None:
        """How several ranks share the work; None of a run that one trains alone."""
        return self.summary.machines()

    @property
    def machine_memory(self) -> float | None:
        """Bytes of memory that the machine has."""
        return number(mapping(self.summary.started.get("machine")).get("memory_bytes"))

    @property
    def memory(self) -> tuple[float | None, float | None, float | None]:
        """Bytes of the process, at most so far, and of the machine."""
        latest = self.summary.memory[-1] if self.summary.memory else {}
        return (
            number(latest.get("process_bytes")),
            self.summary.peak_memory_bytes,
            self.machine_memory,
        )

    @property
    def sensors(self) -> dict[str, Any]:
        """The latest reading of the sensors."""
        return self.summary.sensors[-1] if self.summary.sensors else {}

    @property
    def core_use(self) -> list[float]:
        found = self.sensors.get("core_use")
        return (
            [min(1.0, max(0.0, number(use) or 0.0)) for use in found]
            if isinstance(found, list)
            else []
        )

    def core_map(self, most: int) -> tuple[list[float], list[list[float | None]]]:
        """The use of each core at no more than `most` readings of the sensors: their steps, and a row for each core."""
        events = [
            event for event in self.summary.sensors if isinstance(event.get("core_use"), list)
        ]
        events = [event for event in events if event["core_use"]]
        events = events[:: max(1, -(-len(events) // most))]
        cores = max((len(event["core_use"]) for event in events), default=0)
        rows = [
            [number(dict(enumerate(event["core_use"])).get(core)) for event in events]
            for core in range(cores)
        ]
        return [number(event.get("step")) or 0 for event in events], rows

    @cached_property
    def energy(self) -> Curve:
        """Joules used so far, over seconds of work; empty where nothing could be measured."""
        return self.summary.joules()

    @property
    def joules(self) -> float | None:
        return self.energy.y[-1] if self.energy else None

    @property
    def joules_at_least(self) -> bool:
        """Whether more may have been used than was counted."""
        return any(event.get("at_least") is True for event in self.summary.sensors)

    @property
    def power(self) -> Curve:
        """Watts between one reading of the sensors and the next, over seconds of work."""
        pairs = itertools.pairwise(zip(self.energy.x, self.energy.y, strict=True))
        found = [
            (x, (y - before[1]) / (x - before[0])) for before, (x, y) in pairs if x > before[0]
        ]
        return Curve([x for x, _ in found], [y for _, y in found])

    @property
    def watts(self) -> float | None:
        """Mean power over the latest readings of the sensors."""
        points = list(zip(self.energy.x, self.energy.y, strict=True))[-WATT_STRETCH:]
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            return None
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])

    @property
    def energy_reason(self) -> str | None:
        """Why not all of the energy is known, as the sensors said last."""
        reasons = [str(event["reason"]) for event in self.summary.sensors if event.get("reason")]
        return reasons[-1] if reasons else None

    @property
    def devices(self) -> dict[str, str]:
        """The device of each tower now."""
        return self.devices_of(self.summary.tower_devices[-1]) if self.summary.tower_devices else {}

    @staticmethod
    def devices_of(entry: dict[str, Any]) -> dict[str, str]:
        """The device of each tower in an entry of `Summary.tower_devices`."""
        return {tower: str(device) for tower, device in entry.items() if tower != "step"}

    @staticmethod
    def devices_text(devices: dict[str, str]) -> str:
        """The devices of the towers in words: one word where both are on the same."""
        return " and ".join(dict.fromkeys(devices.values()))

    def to_dict(self, next_commands: Callable[[RunView], list[str]]) -> dict[str, Any]:
        """For scripts: shares from 0 to 1, sizes in bytes, times in seconds. What is not known is null."""
        summary, (process, peak, whole) = self.summary, self.memory
        last = self.latest_step
        names = ("loss", "accuracy", "temperature", "gradient", *self.metrics)
        shown = {name: self.small_curve(name) for name in names}
        return {
            "name": self.name,
            "state": self.status,
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
            "best_split": summary.progress.best_split,
            "best_step": summary.progress.best_step,
            "evaluation": summary.scores or None,
            "evaluations": [_evaluation(event) for event in summary.evaluations],
            "phases": summary.phases(),
            "machines": self.machines.to_dict() if self.machines else None,
            "memory": {"process_bytes": process, "peak_bytes": peak, "machine_bytes": whole},
            "reason": self.error[0] or None if self.state == "failed" else None,
            "sensors": {
                "core_use": self.core_use,
                "joules": self.joules,
                "joules_at_least": self.joules_at_least,
                "watts": self.watts,
                **{name: self.sensors.get(name) for name in SENSED},
            },
            "notices": [asdict(notice) for notice in self.notices],
            "findings": [asdict(finding) for finding in self.findings],
            "curves": {
                name: {"step": points.x, "value": points.y}
                for name, full in {**shown, "recall": self.recall}.items()
                for points in [windows(full, most=IN_JSON)]
            },
            "next": next_commands(self),
        }

    @cached_property
    def _some_steps(self) -> list[dict[str, Any]]:
        """Enough of the steps for a small curve, the newest among them."""
        steps = self.summary.steps
        return steps[:: -max(1, len(steps) // ENOUGH)][::-1]


def view_of(run: Run) -> RunView:
    """How a run stands, from all of its events."""
    state = run.state
    return RunView(run.path.resolve().name, state, summarise(read_events(run.events)))


def _step_value(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function that reads a value from a step event."""
    return STEP_VALUES.get(name) or (lambda event: event.get(name))


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    recalls = {name: number(event["evaluation"].get(name)) for name in ("t2i_r1", "i2t_r1")}
    about = {name: event.get(name) for name in ("step", "epoch", "split")}
    return {**about, "best": bool(event.get("best")), **recalls}

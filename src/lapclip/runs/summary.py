"""A run as its events tell it: how far it is, how fast it goes, where time, memory and energy went.

Works from the events alone, before, during and after a run. Steps that were computed again after a crash count once:
the last event of a step number is taken. Kinds of events and fields that are not there leave gaps, never errors.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from lapclip.runs.curves import Curve, curve, median, windows
from lapclip.runs.events import mapping
from lapclip.text import number, one_line

ENDINGS = ("finished", "stopped", "failed")
RECENT = 50
"""Steps that the speed is taken from."""
MOST_PAIRS = 1e12
"""A batch of more is a damaged line."""
INCIDENTS = ("started", "resumed", "fell_back", "paused", "went_on", "stopped", "failed")
LEAST_PAUSE, PAUSE = 60.0, 10
"""Seconds without an event, and times the longest of the last gaps, from which on they count as a pause."""
LONGEST_NAME, LONGEST_TEXT = 60, 400
"""Letters of a computer's name, and of an advice."""
MOST_RANKS = 64
"""Ranks that are told of each by itself; of more, the first."""
RANK_STRETCH = 12
"""Latest `ranks` events, five seconds apart, whose median is told."""
WAITS_LITTLE, WAITS_ALIKE = 0.1, 0.1
"""Share of its time below which no rank waits for long; difference of such shares below which all wait for the link."""


@dataclass
class RunProgress:
    """How far a run is, told event by event. Of these it holds those that began, paused and ended the run."""

    started: dict[str, Any] = field(default_factory=dict)
    paused: dict[str, Any] = field(default_factory=dict)
    """The event that paused it, while nothing has happened since."""
    ending: dict[str, Any] = field(default_factory=dict)
    """The event that ended the run, if it has ended."""
    step: int = 0
    total_steps: int = 0
    best_recall: float | None = None
    """Held-out text-to-image R@1 of the best model so far."""
    best_split: str | None = None
    """The split that it was measured on."""
    best_step: int | None = None
    """The step of the best model so far, which is kept."""
    process: int = 0
    """Processes that have worked on the run."""

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event into account."""
        kind, step = event["type"], number(event.get("step"))
        if kind == "paused":
            self.paused = event
        elif kind in ("started", "resumed", "step", "went_on", *ENDINGS):
            self.paused = {}
        if kind in ("started", "resumed", "step"):
            self.ending = {}
        if kind in ("started", "resumed"):
            self.process += 1
        match kind:
            case "started" | "resumed":
                if kind == "started":
                    self.started = event
                configured = number(setting(event, "train", "steps"))
                self.total_steps = int(number(event.get("steps")) or configured or self.total_steps)
            case "evaluation" if event.get("best") and isinstance(event.get("evaluation"), dict):
                self.best_recall = number(event["evaluation"].get("t2i_r1"))
                self.best_split = str(event.get("split") or "val")
                self.best_step = None if step is None else int(step)
            case "finished" | "stopped" | "failed":
                self.ending = event
        if kind in ("step", "resumed", "fell_back", *ENDINGS) and step is not None:
            self.step = int(step)


@dataclass(frozen=True)
class Rank:
    """One of the ranks that train a run together: a computer, or a process of one. What is not known is None."""

    name: str
    """The computer's, with the rank's number where several ranks are on one."""
    rows: int | None
    """Rows of a batch that it takes."""
    share: float | None
    """The same as a share of the batch."""
    waited: float | None
    """Share of its time that it waits for others, or for what they send."""
    writer: bool
    """Whether it has the run's folder."""


@dataclass(frozen=True)
class Machines:
    """How the ranks of a run share its work, and how fast they are."""

    count: int
    ranks: list[Rank]
    """All, or the first of very many."""
    step_seconds: float | None
    """What the latest steps took."""
    advice: str
    """Which host is slowest, and which division of the rows would be faster."""

    @property
    def timed(self) -> list[Rank]:
        """Those whose waiting is known, who waits least first: that is the one that is waited for."""
        known = [
            (rank.waited, at, rank) for at, rank in enumerate(self.ranks) if rank.waited is not None
        ]
        return [rank for *_, rank in sorted(known)]

    @property
    def waiting(self) -> str:
        """Who waits for whom, in a sentence; nothing before that is known."""
        if len(self.timed) < 2:
            return ""
        least, most = self.timed[0].waited or 0.0, self.timed[-1].waited or 0.0
        if most < WAITS_LITTLE:
            return "Nobody waits long for the others."
        if most - least < WAITS_ALIKE:
            return "All wait about as long: for the network, not for one of them."
        names = [
            rank.name
            for rank in reversed(self.timed)
            if (rank.waited or 0.0) - least >= WAITS_ALIKE
        ]
        more = [f"{len(names) - 3:,} more"] if len(names) > 4 else []
        *first, last = [*(names[:3] if more else names), *more]
        waits = f"{', '.join(first)} and {last} wait" if first else f"{last} waits"
        return f"{waits} for {self.timed[0].name}, which waits least itself."

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sentence, for scripts and the page."""
        return {**asdict(self), "waiting": self.waiting}


@dataclass(frozen=True)
class Summary:
    """What is known of a run.

    Events keep their fields and gain `elapsed`, the seconds of work until then, pauses left out, and `process`, which
    counts the processes that worked. Steps also gain `gap`: the seconds since the step before, None after a start.
    """

    progress: RunProgress = field(default_factory=RunProgress)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    sensors: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    resumes: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    """What the model answered to a few fixed captions, at each evaluation."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """How the ranks of the latest process that worked have fared. Empty for one alone."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """Starts, resumes, fallbacks, pauses and ends, in their order."""
    elapsed: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """From when to when nothing happened while a process was there: the machine slept, or the run was polite."""

    @property
    def started(self) -> dict[str, Any]:
        return self.progress.started

    @property
    def ending(self) -> dict[str, Any]:
        """The event that ended the run, if it has ended."""
        return self.progress.ending

    @property
    def paused(self) -> dict[str, Any]:
        """The event that paused it, while nothing has happened since."""
        return self.progress.paused

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def total_steps(self) -> int:
        return self.progress.total_steps

    def setting(self, section: str, name: str) -> Any:
        """A setting of the run, or None."""
        return setting(self.started, section, name)

    @property
    def batch_size(self) -> int:
        found = number(self.setting("train", "batch_size")) or 0
        return int(found) if 0 < found < MOST_PAIRS else 0

    @property
    def chance_loss(self) -> float | None:
        """Loss of guessing, as the run recorded it."""
        return number(self.started.get("chance_loss"))

    @property
    def training_seconds(self) -> float:
        """As the run counted them, or as its events were written."""
        return number(self.ending.get("training_seconds")) or self.elapsed

    @property
    def pairs_per_second(self) -> float | None:
        """As the run counted them, or from the time between its latest steps, evaluations and checkpoints included."""
        counted = number(self.ending.get("pairs_per_second"))
        gaps = self._process_gaps()[-RECENT:]
        if counted is not None or not sum(gaps):
            return counted
        return self.batch_size * len(gaps) / sum(gaps)

    @property
    def peak_memory_bytes(self) -> float | None:
        ended = number(self.ending.get("peak_memory_bytes"))
        return (
            max((*curve(self.memory, lambda event: event.get("peak_bytes")).y, ended or 0)) or None
        )

    @property
    def scores(self) -> dict[str, Any]:
        """Held-out scores with their split: those of the finished model, or of the best one so far."""
        if isinstance(final := self.ending.get("evaluation"), dict) and final:
            return final
        best = [event for event in self.evaluations if event.get("best")] or self.evaluations
        return {"split": best[-1].get("split"), **best[-1]["evaluation"]} if best else {}

    @property
    def tower_devices(self) -> list[dict[str, Any]]:
        """On which device each tower ran, and from which step on."""
        return tower_devices((self.started, *self.fallbacks)) if self.started else []

    def speed(self) -> Curve:
        """Pairs a second over the steps, in windows; a median leaves out the pauses for evaluation.

        Steps are written down one step late, but at once before a checkpoint: one gap alone may be next to nothing.
        """
        gaps = windows(curve(self.steps, lambda event: event["gap"]), least=5)
        points = [
            (x, self.batch_size / gap)
            for x, gap in zip(gaps.x, gaps.y, strict=True)
            if gap > 0 and self.batch_size
        ]
        return Curve([x for x, _ in points], [y for _, y in points])

    def phases(self) -> dict[str, float]:
        """Seconds of each phase in a typical step: medians of the measured ones, the first left out as warm-up."""
        measured = [
            event["seconds"] for event in self.steps if isinstance(event.get("seconds"), dict)
        ]
        measured = measured[1:] or measured
        names = dict.fromkeys(name for seconds in measured for name in seconds)
        values = {
            name: [v for s in measured if (v := number(s.get(name))) is not None] for name in names
        }
        return {name: statistics.median(found) for name, found in values.items() if found}

    def machines(self) -> Machines | None:
        """How several ranks share the work, told from their latest events; None of a run that one trains alone."""
        latest = self.ranks[-1] if self.ranks else {}
        hosts = latest.get("hosts")
        if not isinstance(hosts, list) or len(hosts) < 2:
            return None
        recent = [event for event in self.ranks[-RANK_STRETCH:] if event.get("hosts") == hosts]
        rows = [_of_rank(latest, "rows", rank) for rank in range(len(hosts))]
        total = sum(known for known in rows if known is not None)
        ranks, names = [], _rank_names(hosts)
        for rank, own in enumerate(rows[:MOST_RANKS]):
            waited = median(_of_rank(event, "waited", rank) for event in recent)
            ranks.append(
                Rank(
                    name=names[rank],
                    rows=None if own is None else round(own),
                    share=own / total if own is not None and total else None,
                    waited=None if waited is None else min(1.0, waited),
                    writer=number(latest.get("writer")) == rank,
                )
            )
        process = latest["process"]
        latest_steps = [event for event in self.steps[-RECENT:] if event["process"] == process]
        return Machines(
            count=len(hosts),
            ranks=ranks,
            step_seconds=_positive(median(event["gap"] for event in latest_steps)),
            advice=one_line(latest.get("advice") or "")[:LONGEST_TEXT],
        )

    def parts(self) -> list[str]:
        """The parts of the model that have gradient norms: tower by tower, from the input inwards."""
        found = {part for event in self.steps for part in _norms(event)}
        return sorted(found, key=_depth)

    def gradient_map(self, most: int) -> tuple[list[float], list[list[float | None]]]:
        """Gradient norms in at most `most` windows: the last step of each, and a row of medians for each part."""
        steps = [event for event in self.steps if _norms(event)]
        size = max(1, -(-len(steps) // most))
        stretches = [steps[first : first + size] for first in range(0, len(steps), size)]
        rows = [
            [median(number(_norms(event).get(part)) for event in stretch) for stretch in stretches]
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
            known = {
                (event["process"], name): value
                for name, value in counted.items()
                if number(value) is not None
            }
            if known:
                if not event["rested"]:
                    total += sum(
                        max(0.0, value - before.get(source, 0.0)) for source, value in known.items()
                    )
                before |= known
                x.append(event["elapsed"])
                y.append(total)
        return Curve(x, y)

    def _process_gaps(self) -> list[float]:
        """Return the seconds between steps of the latest process: after a resume the machine may be another."""
        latest = self.progress.process
        known = [event for event in self.steps if event["process"] == latest]
        return [event["gap"] for event in known if event["gap"] is not None]


def summarise(events: Iterable[dict[str, Any]]) -> Summary:
    """Read a run's events in the order they were written."""
    by_step: dict[str, dict[int, dict[str, Any]]] = {
        "step": {},
        "evaluation": {},
        "memory": {},
        "looked": {},
    }
    lists: dict[str, list[dict[str, Any]]] = {"fell_back": [], "resumed": [], "sensors": []}
    incidents: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    progress = RunProgress()
    elapsed, before = 0.0, None
    step_before: tuple[float, float] | None = None
    rested = False
    pauses: list[tuple[float, float]] = []
    usual = _UsualGap()
    for event in events:
        kind, time, step = event["type"], number(event.get("time")), number(event.get("step"))
        if kind in ("started", "resumed"):
            before, step_before = None, None  # what lies between two processes is a pause, not work
            ranks = []  # others may train it now, or one alone
        if time is not None:
            passed = (
                max(0.0, time - before) if before is not None else 0.0
            )  # a clock may be set back
            if kind == "went_on" or usual.is_pause(passed, measured=number(event.get("seconds"))):
                pauses.append((time - passed, time))
                passed, step_before, rested = 0.0, None, True
            elapsed += passed
            before = time
        progress.take(event)
        known = {**event, "elapsed": elapsed, "process": progress.process}
        if kind in INCIDENTS:
            incidents.append(known)
        if kind == "ranks" and step is not None:
            ranks.append(known)
        if kind in lists:
            if kind == "sensors":
                known["rested"], rested = rested, False
            lists[kind].append(known)
            step_before = (
                None if kind == "fell_back" else step_before
            )  # making everything anew is no step
        elif kind in by_step and step is not None:
            if kind == "step":
                known["gap"] = None
                if (
                    step_before is not None and step > step_before[0]
                ):  # of a long run some steps are left out
                    known["gap"] = (elapsed - step_before[1]) / (step - step_before[0])
                    usual.add(known["gap"])
                step_before = (step, elapsed)
            if kind == "evaluation":
                if not isinstance(event.get("evaluation"), dict):
                    continue
                # A step that is done again after a crash saves its model only if it scores higher than before.
                earlier = by_step[kind].get(int(step), {})
                known["best"] = bool(event.get("best") or earlier.get("best"))
            by_step[kind][int(step)] = known
    ordered = {kind: [found[step] for step in sorted(found)] for kind, found in by_step.items()}
    return Summary(
        progress=progress,
        steps=ordered["step"],
        evaluations=ordered["evaluation"],
        memory=ordered["memory"],
        sensors=lists["sensors"],  # all of them: work that was lost in a crash used energy too
        fallbacks=lists["fell_back"],
        resumes=lists["resumed"],
        probes=ordered["looked"],
        ranks=ranks,
        incidents=incidents,
        elapsed=elapsed,
        pauses=pauses,
    )


def tower_devices(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """On which device each tower ran, and from which step on: one entry, and one more for each move to another."""
    found: list[dict[str, Any]] = []
    for event in events:
        devices = event.get("devices")
        if not isinstance(devices, dict):
            continue
        if event["type"] == "started":
            found = [{"step": 1, **devices}]
        elif event["type"] == "fell_back":
            now = {"step": int(number(event.get("step")) or 0) + 1, **devices}
            found = [
                entry for entry in found if entry["step"] < now["step"]
            ]  # what came later was done again
            if not found or found[-1] | {"step": 0} != now | {"step": 0}:
                found.append(now)
    return found


def setting(started: dict[str, Any], section: str, name: str) -> Any:
    """A setting of the run that this event started, or None."""
    return mapping(mapping(started.get("config")).get(section)).get(name)


def batch_accuracy(event: dict[str, Any]) -> float | None:
    """The accuracy of a step's batch: the mean of both ways."""
    ways = [
        way
        for name in ("t2i_accuracy", "i2t_accuracy")
        if (way := number(event.get(name))) is not None
    ]
    return sum(ways) / len(ways) if ways else None


def usual_gap(summary: Summary) -> float | None:
    """The longest of the last gaps between steps."""
    last = itertools.islice(reversed(summary.steps), 50)
    return max((event["gap"] for event in last if event["gap"] is not None), default=None)


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
    return mapping(event.get("grad_norms"))


def _of_rank(event: dict[str, Any], name: str, rank: int) -> float | None:
    """What an event says of one rank; None where that is missing, or not possible."""
    values = event.get(name)
    found = number(values[rank]) if isinstance(values, list) and rank < len(values) else None
    return float(found) if found is not None and found >= 0 else None


def _rank_names(hosts: list[Any]) -> list[str]:
    """The computers' names, with the rank's number where that alone would not tell."""
    names = [one_line(host)[:LONGEST_NAME] if isinstance(host, str) else "" for host in hosts]
    often = Counter(names)
    return [
        f"{name}, rank {rank}" if name and often[name] > 1 else name or f"rank {rank}"
        for rank, name in enumerate(names)
    ]


def _positive(value: Any) -> float | None:
    found = number(value)
    return found if found and found > 0 else None


def _depth(part: str) -> tuple[str, int, str]:
    """Towers in order, each from its embedding through its blocks to its head; then what belongs to neither."""
    tower, dot, block = part.partition(".")
    if not dot:
        return "~", 0, part
    depth = int(block) if block.isdigit() else {"embedding": -1}.get(block, 1_000_000)
    return tower, depth, block

"""The events a run emits, and events on disk: appended a line at a time, read back whole lines only.

Each becomes one JSON line with `v`, `type` and `time` in front.

    started     once per run       resolved configuration, machine, versions, commit, where each tower runs
    resumed     per resume         from which checkpoint, and what was skipped
    step        per update         loss, accuracy, temperature, learning rate, gradient norms, phases
    memory      now and then       what the process and the device hold
    ranks       now and then       rows of each rank, who waits for whom, which division would be faster
    sensors     now and then       energy, heat, clock, use of the cores, swap
    evaluation  between epochs     recall on held-out pairs
    checkpoint  now and then       where it is and what it cost
    looked      at an evaluation   the best images for a few probe captions, and the rank of the right one
    fell_back   after a failure    why, and the settings the run goes on with
    paused, went_on                a polite run that leaves the machine to others for a while
    finished, stopped, failed      how it ended

Readers ignore fields and types they do not know, and take the last event of a step number: after a crash some steps
are computed again, to the same values. `VERSION` rises when a field changes its meaning.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from lapclip.errors import RunError
from lapclip.paths import open_own
from lapclip.suggest import command

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    type = "event"

    def to_dict(self, time: float) -> dict[str, Any]:
        """The event as it is written."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"v": VERSION, "type": self.type, "time": round(time, 3), **values}


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    type = "started"
    config: dict[str, Any]
    reasons: dict[str, str]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    devices: dict[str, str]
    steps: int
    steps_per_epoch: int
    pairs: dict[str, int]
    captions: dict[str, dict[str, float]]
    """For each split how many `captions`, how many `distinct` ones, and `told_apart`: the share of images with a
    caption that no other has."""
    parameters: int
    tuned_seconds: float | None
    """What a step took when the settings were chosen; None where none was timed."""
    memory_limit_bytes: int
    """What the run can have where it trains: what it held at the start and what was free beside it."""
    notes: list[str]
    """What was asked for and could not be had, in words."""
    chance_loss: float | None = None
    """The loss of guessing: ln(batch size) for the softmax loss."""
    set_up_seconds: dict[str, float] = field(default_factory=dict)
    """How long each phase took before the first step."""
    metrics: dict[str, str] = field(default_factory=dict)
    """What each further metric of the objectives is, by its name in the step events."""
    hardware: dict[str, str] = field(default_factory=dict)
    """The name of each kind of device that it trains on, as `{"cuda": "NVIDIA H200"}`."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    type = "resumed"
    step: int
    steps: int
    batch_size: int
    checkpoint: str
    skipped: list[str]
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    """As `started` has it; another one where the run was moved."""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    type = "step"
    step: int
    epoch: int
    loss: float
    t2i_accuracy: float
    i2t_accuracy: float
    logit_scale: float
    temperature: float
    lr: float
    grad_norm: float | None
    """None where float16 overflowed and the update was left out."""
    grad_norms: dict[str, float]
    seconds: dict[str, float] | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics of the objectives, for example `teacher_loss`. In the file each is a field of the event.
    `started` describes them."""

    def to_dict(self, time: float) -> dict[str, Any]:
        values = super().to_dict(time)
        metrics = values.pop("metrics")
        return values | metrics


@dataclass(frozen=True, kw_only=True)
class Memory(Event):
    type = "memory"
    step: int
    process_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sensors(Event):
    type = "sensors"
    step: int
    joules: dict[str, float] | None
    """Since this process began to train, by source."""
    celsius: float | None
    megahertz: float | None
    core_use: list[float]
    """Share of each core in use since the sensors event before, by any process."""
    swap_bytes: int
    throttled: bool | None
    reason: str | None
    """Why some of the energy is not known."""
    at_least: bool = False
    """Whether more joules may have been used than were counted: a counter was not read for too long."""
    others: float | None = None
    """Share of all cores that programs other than the run used since the sensors event before, or since a pause; null
    where the system does not say, or where too little time has passed to tell."""


@dataclass(frozen=True, kw_only=True)
class Ranks(Event):
    type = "ranks"
    step: int
    hosts: list[str]
    """The computer of each rank."""
    rows: list[int]
    """Rows of a batch that each rank takes."""
    waited: list[float]
    """Share of its time that each rank has waited for others since the event before."""
    writer: int
    """The rank that has the run's folder."""
    advice: str = ""
    """Which division of rows among hosts would be faster, and what leaving out the slowest would give."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    type = "evaluation"
    step: int
    epoch: int
    split: str
    evaluation: dict[str, Any]
    seconds: float
    best: bool


@dataclass(frozen=True, kw_only=True)
class Probed(Event):
    type = "looked"
    step: int
    epoch: int
    answers: list[dict[str, Any]]
    """For each caption: `caption, own` (the user's), `right` (its image) and its `rank`, and `top`: five of
    `picture, score`. Image 17 is pictures/17.png in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    type = "paused"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WentOn(Event):
    type = "went_on"
    step: int
    seconds: float
    """How long the pause was."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    type = "checkpoint"
    step: int
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FellBack(Event):
    type = "fell_back"
    step: int
    """The last step that counts: the run goes on after it."""
    cause: str
    """`out of memory`, `swap`, `missing operation` or `device error`."""
    change: dict[str, Any]
    """Settings of `train`. A resumed run goes on with them; run.toml stays the record of the start."""
    devices: dict[str, str]
    text: str


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    type = "finished"
    step: int
    training_seconds: float
    pairs_per_second: float
    peak_memory_bytes: int
    evaluation: dict[str, Any]
    places: list[dict[str, Any]]
    """Where each tower ran, and from which step on."""
    best_step: int = 0
    """The step of the model that is kept, which `evaluation` scores."""
    early: str = ""
    """Why it ended before its last step, where it did."""
    start_evaluation: dict[str, Any] | None = None
    """The same metrics of the trained model that the run began with; None where there was none."""
    short_questions: dict[str, Any] | None = None
    """How well words and phrases of the same captions find their images; None where there are too few."""


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    type = "stopped"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    type = "failed"
    step: int
    error: str


Listener = Callable[[Event], None]
STEP_FIELDS = {"v", "type", "time", *(field.name for field in fields(Step))}
LONGEST_LINE = 4_000_000
"""Bytes of a line; a longer one is no event, and is passed over without being held."""


class EventLog:
    """Appends events to a file and tells listeners of each."""

    def __init__(self, path: Path, *listeners: Listener) -> None:
        self.path = path
        self.listeners = listeners
        try:
            _drop_half_line(path)
            self._file = open_own(path, "a", encoding="utf-8")  # open as long as the run
        except OSError as error:
            raise self._cannot_write(error) from error

    def append(self, event: Event) -> None:
        """Write one line and hand it to the system, so that a killed process loses none of its events."""
        try:
            self._file.write(json.dumps(event.to_dict(time.time()), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error
        for listener in self.listeners:
            listener(event)

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(
            f"Cannot write to {self.path}: {error.strerror or error}.",
            hint=f"free some disk space, then {command('resume', self.path.parent.name)}",
        )

    def close(self) -> None:
        """Close the file; what cannot be written any more has been reported by `append`."""
        try:
            self._file.close()
        except OSError:
            pass


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events so far. A half-written last line and damaged lines are passed over."""
    try:
        file = open_own(path)
    except OSError:
        return
    with file:
        for line in _whole_lines(file):
            event = parse_line(line.decode("utf-8", errors="replace"))
            if event is not None:
                yield event


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines that end, and are no longer than an event may be."""
    at_its_begin = True
    while part := file.readline(LONGEST_LINE):
        ends = part.endswith(b"\n")
        if ends and at_its_begin:
            yield part
        at_its_begin = ends


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The event of a line; None where it is rubbish, or nested too deep to be read."""
    try:
        event = _DECODER.decode(line if isinstance(line, str) else line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return checked_event(event)


def parse_lines(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the events of some lines. Damaged lines are left out.

    Lines that are decoded together share the names of their fields, which are half of their memory.
    """
    try:
        values = _DECODER.decode((b"[" + b",".join(lines) + b"]").decode("utf-8"))
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):
        return [event for event in map(parse_line, lines) if event is not None]
    return [event for event in map(checked_event, values) if event is not None]


def checked_event(value: Any) -> dict[str, Any] | None:
    """Return an event whose numbers can be computed with. None if the value is no event.

    Counts below 0 or above `MOST_COUNT` are dropped, and so are settings of `train` below 0. Other numbers were checked
    when the line was decoded.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return None
    _drop_odd(value, COUNTS)
    for part in ("pairs", "captions", "evaluation", "worth"):
        _drop_odd(value.get(part), COUNTS if part in ("evaluation", "worth") else None)
    for counts in mapping(value.get("captions")).values():
        _drop_odd(counts, None)
    train = mapping(mapping(value.get("config")).get("train"))
    _drop_odd(train, None, most=LARGEST)  # a seed may be larger than any count
    return value


COUNTS = (
    "step",
    "steps",
    "epoch",
    "steps_per_epoch",
    "batch_size",
    "parameters",
    "candidates",
    "best_step",
)
MOST_COUNT = 1e15
LARGEST = 1e100  # products of a few such numbers are still finite


def _drop_odd(fields: Any, names: tuple[str, ...] | None, most: float = MOST_COUNT) -> None:
    """Drop numbers that are no counts from these fields, or from all fields if there are no names."""
    if not isinstance(fields, dict):
        return
    for name in fields.keys() if names is None else fields.keys() & names:
        found = fields[name]
        if isinstance(found, int | float) and not 0 <= found <= most:
            fields[name] = None


def _finite(text: str) -> float | None:
    """Return the float that a JSON text holds. None if it is too large to compute with."""
    value = float(text)
    return value if abs(value) <= LARGEST else None


def _whole(text: str) -> int | None:
    """Return the integer that a JSON text holds. None if it is too large to compute with."""
    return int(text) if len(text) <= 100 else None


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_whole, parse_constant=lambda name: None)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary, else an empty one: a file may come from another version, or be damaged."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The dictionaries of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _drop_half_line(path: Path) -> None:
    """Remove what a killed process had begun to write, so that the next event starts on a line of its own."""
    if not path.exists():
        return
    with open_own(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)

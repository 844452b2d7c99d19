"""The events a run emits. Each becomes one JSON line with `v`, `type` and `time` in front.

    started     once per run       resolved configuration, machine, versions, commit, where each tower runs
    resumed     per resume         from which checkpoint, and what was skipped
    step        per update         loss, accuracy, temperature, learning rate, gradient norms, phases
    memory      now and then       what the process and the device hold
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

from dataclasses import dataclass, field, fields
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    type = "resumed"
    step: int
    steps: int
    batch_size: int
    checkpoint: str
    skipped: list[str]
    notes: list[str] = field(default_factory=list)


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
    teacher_loss: float | None = None
    """How far the model is from its teacher, which is part of the loss; None where it has none."""
    logit_bias: float | None = None
    """The learnt bias of the sigmoid loss; null for others."""


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
    early: str = ""
    """Why it ended before its last step, where it did."""
    start_evaluation: dict[str, Any] | None = None
    """The same metrics of the trained model that the run began with; None where there was none."""


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

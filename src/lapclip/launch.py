"""Turn a command into a run: settle what is "auto", load the data, start or resume, and sum up."""

from __future__ import annotations

import importlib.metadata
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lapclip import __version__
from lapclip.config import AUTO, Config, Layer, build_config, parse_settings, read_recipe, replace_in
from lapclip.data.batches import BatchPlan
from lapclip.data.pairs import DataSet
from lapclip.data.pixels import Progress as DataProgress
from lapclip.data.sources import load_scenes
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder, load
from lapclip.errors import ConfigError, LapclipError, RunError
from lapclip.machine import devices, facts
from lapclip.machine.devices import Device
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.zoo import SHAPES
from lapclip.randomness import derived_seed
from lapclip.records import events
from lapclip.records.lines import LineWriter
from lapclip.records.runs import FORMAT, Run, check_name, create_run, find_run
from lapclip.records.store import EventLog, Listener, read_events
from lapclip.train.checkpoint import load_newest
from lapclip.train.loop import Training, score
from lapclip.train.optimizer import make_optimizer
from lapclip.train.step import TrainStep


@dataclass(frozen=True)
class Outcome:
    """What `train` and `resume` report."""

    run: str
    state: str
    seconds: float
    training_seconds: float
    steps: int
    pairs_per_second: float
    peak_memory_bytes: int
    devices: dict[str, str]
    evaluation: dict[str, Any] | None
    stop_signal: int | None = None

    @property
    def exit_status(self) -> int:
        """0, or 128 and the signal that ended the run."""
        return 128 + self.stop_signal if self.stop_signal else 0

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "stop_signal"}


@dataclass(frozen=True)
class Hooks:
    """Who wants to know: listeners for events, and progress while data is made."""

    listeners: Sequence[Listener] = ()
    data_progress: DataProgress | None = None


def start(
    recipe: str, settings: list[str], minutes: float | None = None, name: str | None = None, hooks: Hooks = Hooks()
) -> Outcome:
    """Train from a recipe in a new run."""
    began = time.perf_counter()
    check_name(name)
    flags = Layer("--minutes", {"train": {"minutes": minutes}} if minutes is not None else {})
    config = build_config([read_recipe(recipe), flags, parse_settings(settings)], SHAPES)
    config, device, reasons = settle(config)
    data = load_scenes(config.data, config.model.image_size, hooks.data_progress)
    config, tokenizer = fit_vocabulary(config, data)
    config, reasons["train.steps"] = count_steps(config, data, tokenizer, device)
    about = {"format": FORMAT, "recipe": recipe, "lapclip": __version__, "data_fingerprint": data.fingerprint}
    run = create_run(name, recipe.removesuffix(".toml"), {"run": about, **asdict(config), "reasons": reasons})
    with run.lock(), _recording(run, hooks) as log:
        training = prepare(run, config, data, tokenizer, device, log)
        log.append(_started(training, reasons))
        return work(training, began)


def resume(name: str | None, hooks: Hooks = Hooks()) -> Outcome:
    """Go on with a run from its newest good checkpoint."""
    began = time.perf_counter()
    run = find_run(name)
    saved = run.read_settings()
    with run.lock():
        if run.last_word == "finished":
            raise RunError(f"{run.path} is finished; there is nothing to resume.", hint=f"lapclip eval {run.name}")
        config, data, tokenizer = reopen(run, saved, hooks)
        device, _ = devices.choose_device(config.train.device)
        devices.prepare(device, int(config.train.threads))
        run.clear_stop()
        with _recording(run, hooks) as log:
            training = prepare(run, config, data, tokenizer, device, log)
            progress, skipped = load_newest(run.checkpoints, training.step.model, training.step.optimizer)
            if progress is None and any(event["type"] == "step" for event in read_events(run.events)):
                detail = f" ({'; '.join(skipped)})" if skipped else ""
                raise RunError(
                    f"{run.path} has no good checkpoint left{detail}.", hint="lapclip train starts a new run"
                )
            if progress is None:
                log.append(_started(training, saved["reasons"]))
            else:
                training.progress = progress
                newest = f"step-{progress.step:08d}"
                log.append(events.Resumed(step=progress.step, steps=training.steps, checkpoint=newest, skipped=skipped))
            return work(training, began)


def evaluate(name: str | None, hooks: Hooks = Hooks()) -> dict[str, Any]:
    """Score a run's best model on the split that chose nothing."""
    run = find_run(name)
    config, data, _ = reopen(run, run.read_settings(), hooks)
    split, pairs = data.final
    return {"run": str(run.path), "split": split, "evaluation": score(load(run.path), pairs, config.train.batch_size)}


def settle(config: Config) -> tuple[Config, Device, dict[str, str]]:
    """Decide what is "auto", with the reason for each choice, and fix what results depend on."""
    device, why = devices.choose_device(config.train.device)
    reasons = {"train.device": why}
    threads, dtype = config.train.threads, config.train.dtype
    reasons["train.threads"] = "torch's own choice" if threads == AUTO else "asked for"
    reasons["train.dtype"] = "the safe choice; nothing is timed yet" if dtype == AUTO else "asked for"
    threads = devices.default_threads() if threads == AUTO else int(threads)
    dtype = "float32" if dtype == AUTO else dtype
    devices.prepare(device, threads)
    return replace_in(config, "train", device=device.kind, threads=threads, dtype=dtype), device, reasons


def fit_vocabulary(config: Config, data: DataSet) -> tuple[Config, CharacterTokenizer]:
    """The tokenizer for the data, and the model's vocabulary to match."""
    if data.alphabet is not None:
        tokenizer = CharacterTokenizer(data.alphabet)
    else:
        tokenizer = CharacterTokenizer.learn(caption for captions in data.train.captions for caption in captions)
    return replace_in(config, "model", vocabulary=tokenizer.vocabulary), tokenizer


def count_steps(config: Config, data: DataSet, tokenizer: CharacterTokenizer, device: Device) -> tuple[Config, str]:
    """Turn epochs or minutes into a number of steps, once; the schedule and a resumed run rely on it."""
    train = config.train
    plan = BatchPlan(data.train, tokenizer, config.model.context, train.batch_size, train.seed)
    if train.steps and train.minutes:
        raise ConfigError(
            "train.steps and train.minutes are both set.", hint="--minutes alone, or --set train.minutes=0"
        )
    if train.minutes:
        step_seconds, evaluation_seconds = time_parts(config, data, plan, tokenizer, device)
        per_step = step_seconds + evaluation_seconds / (plan.steps_per_epoch * train.evaluate_every_epochs)
        steps = max(1, int(train.minutes * 60 / per_step))
        reason = f"{train.minutes:g} minutes at {per_step:.3f} s a step, timed here before training"
    elif train.steps:
        steps, reason = train.steps, "asked for"
    else:
        steps, reason = train.epochs * plan.steps_per_epoch, f"{train.epochs} epochs of {plan.steps_per_epoch} steps"
    return replace_in(config, "train", steps=steps), reason


def time_parts(
    config: Config, data: DataSet, plan: BatchPlan, tokenizer: CharacterTokenizer, device: Device
) -> tuple[float, float]:
    """Seconds of a real step and of a real evaluation, on a model that is thrown away."""
    step, embedder = build(config, tokenizer, device)
    times = []
    while len(times) < 8 and (sum(times) < 10 or len(times) < 3):
        began = time.perf_counter()
        step(
            plan.batch(1 + len(times) % plan.steps_per_epoch), 1, 0.0, Stopwatch(device.synchronise, on=False)
        ).loss.item()
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    score(embedder, data.held_out, config.train.batch_size)
    return sorted(times[1:])[len(times[1:]) // 2], time.perf_counter() - began


def build(config: Config, tokenizer: CharacterTokenizer, device: Device) -> tuple[TrainStep, Embedder]:
    """A fresh model with its optimiser, ready to step, and the same model ready to embed."""
    model = CLIP(config.model, seed=derived_seed(config.train.seed, "weights")).to(device.torch)
    optimizer = make_optimizer(model, config.train, device)
    return TrainStep(model, optimizer, config.train, device), Embedder(model, tokenizer, device, config.train.dtype)


def prepare(
    run: Run, config: Config, data: DataSet, tokenizer: CharacterTokenizer, device: Device, log: EventLog
) -> Training:
    """Everything a run works with, before its first step."""
    step, embedder = build(config, tokenizer, device)
    plan = BatchPlan(data.train, tokenizer, config.model.context, config.train.batch_size, config.train.seed)
    return Training(run, config, data, plan, step, embedder, device, log)


def reopen(run: Run, saved: dict[str, Any], hooks: Hooks) -> tuple[Config, DataSet, CharacterTokenizer]:
    """The configuration and the data a run began with."""
    layer = Layer(str(run.settings), {section: saved.get(section, {}) for section in ("model", "data", "train")})
    config = build_config([layer], SHAPES)
    data = load_scenes(config.data, config.model.image_size, hooks.data_progress)
    if data.fingerprint != saved["run"].get("data_fingerprint"):
        raise RunError(
            f"The data is not what {run.path} began with; this lapclip draws other pictures.",
            hint=f"lapclip {saved['run'].get('lapclip')}, or lapclip train for a new run",
        )
    _, tokenizer = fit_vocabulary(config, data)
    return config, data, tokenizer


def work(training: Training, began: float) -> Outcome:
    """Train to the end or to a signal, then score the best model."""
    run, log, signals = training.run, training.log, _Signals()
    training.stop_reason = signals.reason
    try:
        with signals:
            stopped = training.train()
        evaluation = None if stopped else finish(training)
    except Exception as error:
        with suppress(LapclipError):
            log.append(events.Failed(step=training.progress.step, error=str(error) or type(error).__name__))
        raise
    done = training.progress
    return Outcome(
        run=str(run.path),
        state="stopped" if stopped else "finished",
        seconds=time.perf_counter() - began,
        training_seconds=done.training_seconds,
        steps=done.step,
        pairs_per_second=_rate(training),
        peak_memory_bytes=training.device.peak_memory_bytes(),
        devices=_places(training.step.model),
        evaluation=evaluation,
        stop_signal=signals.received,
    )


def finish(training: Training) -> dict[str, Any]:
    """Score the best model on the split that chose nothing, and say that the run is over."""
    split, pairs = training.data.final
    evaluation = {"split": split, **score(load(training.run.path), pairs, training.config.train.batch_size)}
    training.log.append(
        events.Finished(
            step=training.progress.step,
            training_seconds=training.progress.training_seconds,
            pairs_per_second=_rate(training),
            peak_memory_bytes=training.device.peak_memory_bytes(),
            evaluation=evaluation,
        )
    )
    return evaluation


class _Signals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def reason(self) -> str | None:
        return signal.Signals(self.received).name if self.received else None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def _recording(run: Run, hooks: Hooks) -> Iterator[EventLog]:
    """The run's event log, with log.txt written beside it."""
    with open(run.log, "a", encoding="utf-8") as text:
        log = EventLog(run.events, LineWriter(text, every=10.0, clock=time.monotonic), *hooks.listeners)
        try:
            yield log
        finally:
            log.close()


def _started(training: Training, reasons: dict[str, str]) -> events.Started:
    return events.Started(
        config=asdict(training.config),
        reasons=reasons,
        machine=facts.machine_facts(),
        versions={"lapclip": __version__, "torch": torch.__version__, "numpy": importlib.metadata.version("numpy")},
        commit=facts.source_commit(),
        devices=_places(training.step.model),
        steps=training.steps,
        steps_per_epoch=training.plan.steps_per_epoch,
        pairs={split: len(pairs) for split, pairs in training.data.splits.items()},
        parameters=count_parameters(training.step.model),
    )


def _places(model: CLIP) -> dict[str, str]:
    """Where each tower really is."""
    return {tower: next(getattr(model, tower).parameters()).device.type for tower in ("image", "text")}


def _rate(training: Training) -> float:
    pairs = training.progress.step * training.config.train.batch_size
    return pairs / training.progress.training_seconds if training.progress.training_seconds else 0.0

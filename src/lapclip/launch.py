"""Turn a command into a run: settle what is "auto", load the data, start or resume, and sum up."""

from __future__ import annotations

import heapq
import importlib.metadata
import statistics
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
from lapclip.evaluate.baseline import linear_baseline
from lapclip.machine import devices, facts
from lapclip.machine.devices import Device
from lapclip.machine.signals import Signals
from lapclip.machine.timing import Stopwatch, timed
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.zoo import SHAPES
from lapclip.randomness import derived_seed
from lapclip.records import events
from lapclip.records.lines import LineWriter
from lapclip.records.runs import FORMAT, Run, check_name, create_run, find_run
from lapclip.records.store import EventLog, Listener, read_events
from lapclip.train.graph import WARM_UP, AnyStep, make_step
from lapclip.train.loop import Training, score
from lapclip.train.recovery import changes_so_far, memory_explained, persist, places_so_far, restore
from lapclip.tune.kernels import check_kernels
from lapclip.tune.notices import Tell
from lapclip.tune.settle import settle


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
    places: list[dict[str, Any]]
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
    """Who wants to know: listeners for events, and progress while data is made and settings are tried."""

    listeners: Sequence[Listener] = ()
    data_progress: DataProgress | None = None
    tuning_progress: Tell = lambda text: None


def start(
    recipe: str, settings: list[str], minutes: float | None = None, name: str | None = None, hooks: Hooks = Hooks()
) -> Outcome:
    """Train from a recipe in a new run."""
    began = time.perf_counter()
    check_name(name)
    try:
        ready = prepare(recipe, settings, minutes, hooks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before the run began: there is nothing to resume.") from None
    about = {"format": FORMAT, "recipe": recipe, "lapclip": __version__, "data_fingerprint": ready.data.fingerprint}
    run = create_run(name, recipe, {"run": about, **asdict(ready.config), "reasons": ready.reasons})
    with run.lock(), Signals() as signals, _recording(run, hooks) as log:
        training = assemble(run, ready.config, ready.data, ready.device, ready.built, log)
        log.append(_started(training, ready.reasons, ready.notes))
        del ready  # so that what a fallback replaces is gone
        return work(training, signals, began)


@dataclass(frozen=True)
class Ready:
    """A run before it has a folder: nothing is "auto" any more, and the model is built."""

    config: Config
    data: DataSet
    device: Device
    built: tuple[AnyStep, Embedder]
    reasons: dict[str, str]
    notes: list[str]


def prepare(recipe: str, settings: list[str], minutes: float | None, hooks: Hooks) -> Ready:
    """Read the settings, make the data, choose what is "auto" and build the model. What fails here leaves nothing."""
    if minutes is not None and minutes <= 0:
        raise ConfigError(f"--minutes must be more than 0, not {minutes:g}.", hint="lapclip train --minutes 5")
    flags = Layer("--minutes", {"train": {"minutes": minutes}} if minutes is not None else {})
    config = build_config([read_recipe(recipe), flags, parse_settings(settings)], SHAPES)
    if devices.accelerator_here():
        hooks.tuning_progress("whether the accelerator computes what the CPU computes")
    devices.available(config.train.device)  # an unknown device is refused before pictures are drawn
    asked = config.train.compile
    data = load_scenes(config.data, config.model.image_size, hooks.data_progress)
    config, tokenizer = fit_vocabulary(config, data)
    config, why_steps = count_steps(config, data, tokenizer)
    with memory_explained(config):
        longest = longest_caption(config, data, tokenizer)
        plan = make_plan(config, data, tokenizer)
        config, device, reasons = settle(config, plan, longest, hooks.tuning_progress)
        if config.train.minutes:
            config, why_steps = fill_minutes(config, data, tokenizer, device)
        device.release_memory()
        device.forget_peak()  # what was tried before the run is not the run's
        built = build(config, tokenizer, device)
    reasons["train.steps"] = why_steps
    notes = [reasons["train.compile"]] if asked not in (AUTO, config.train.compile) else []
    return Ready(config, data, device, built, reasons, [*notes, *device.warnings()])


def resume(name: str | None, hooks: Hooks = Hooks()) -> Outcome:
    """Go on with a run from its newest good checkpoint."""
    began = time.perf_counter()
    run = find_run(name)
    saved = run.read_settings()
    with run.lock(), Signals() as signals:
        run.clear_stop()  # first of all: a request made from now on is meant for this process
        if run.last_state() == "finished":
            raise RunError(f"{run.path} is finished; there is nothing to resume.", hint=f"lapclip eval {run.name}")
        config, data, tokenizer = reopen(run, saved, hooks)
        config, device = chosen_again(run, config)
        built = build(config, tokenizer, device)
        with _recording(run, hooks) as log:
            training = assemble(run, config, data, device, built, log)
            del built  # so that what a fallback replaces is gone
            skipped = restore(training)
            if skipped is None:
                log.append(_started(training, saved["reasons"], []))  # killed before its first step: it starts again
            else:
                log.append(_resumed(training, skipped))
            return work(training, signals, began)


def evaluate(name: str | None, hooks: Hooks = Hooks()) -> dict[str, Any]:
    """Score a run's best model on the split that chose nothing."""
    run = find_run(name)
    config, data, _ = reopen(run, run.read_settings(), hooks)
    split, pairs = data.final
    return {
        "run": str(run.path),
        "split": split,
        "evaluation": score(load(run.path), pairs, config.train.batch_size),
        "linear_baseline": linear_baseline(data.train, pairs),
    }


def longest_caption(config: Config, data: DataSet, tokenizer: CharacterTokenizer) -> int:
    """The most symbols that a batch of captions is padded to."""
    captions = (caption for options in data.train.captions for caption in options)
    return tokenizer.batch(heapq.nlargest(16, captions, key=len), config.model.context).shape[1]


def fit_vocabulary(config: Config, data: DataSet) -> tuple[Config, CharacterTokenizer]:
    """The tokenizer for the data, and the model's vocabulary to match."""
    if data.alphabet is not None:
        tokenizer = CharacterTokenizer(data.alphabet)
    else:
        tokenizer = CharacterTokenizer.learn(caption for captions in data.train.captions for caption in captions)
    return replace_in(config, "model", vocabulary=tokenizer.vocabulary), tokenizer


def make_plan(config: Config, data: DataSet, tokenizer: CharacterTokenizer) -> BatchPlan:
    """Which pairs in which order."""
    train = config.train
    return BatchPlan(data.train, tokenizer, config.model.context, train.batch_size, train.seed)


def count_steps(config: Config, data: DataSet, tokenizer: CharacterTokenizer) -> tuple[Config, str]:
    """Turn epochs into a number of steps; the schedule and a resumed run rely on it. Minutes wait for the settings."""
    train = config.train
    if train.steps and train.minutes:
        raise ConfigError(
            "train.steps and train.minutes are both set.", hint="--minutes alone, or --set train.minutes=0"
        )
    if train.steps or train.minutes:
        return config, "asked for"
    per_epoch = make_plan(config, data, tokenizer).steps_per_epoch
    return replace_in(config, "train", steps=train.epochs * per_epoch), f"{train.epochs} epochs of {per_epoch} steps"


def fill_minutes(config: Config, data: DataSet, tokenizer: CharacterTokenizer, device: Device) -> tuple[Config, str]:
    """Turn minutes into a number of steps, once."""
    train, plan = config.train, make_plan(config, data, tokenizer)
    step_seconds, evaluation_seconds = time_parts(config, data, plan, tokenizer, device)
    per_step = step_seconds + evaluation_seconds / (plan.steps_per_epoch * train.evaluate_every_epochs)
    # The last step is always evaluated, and the finished model once more on other pairs.
    steps = max(1, int((train.minutes * 60 - 2 * evaluation_seconds) / per_step))
    reason = f"{train.minutes:g} minutes at {per_step:.3f} s a step, timed here before training"
    return replace_in(config, "train", steps=steps), reason


def time_parts(
    config: Config, data: DataSet, plan: BatchPlan, tokenizer: CharacterTokenizer, device: Device
) -> tuple[float, float]:
    """Seconds of a real step and of a real evaluation, on a model that is thrown away."""
    # In a run of two steps whose first half is cheap, step 1 is of one kind and step 2 of the other.
    step, embedder = build(replace_in(config, "train", steps=2, cheap_share=0.5), tokenizer, device)
    share = config.train.cheap_share if config.train.cheap_size or config.train.patch_dropout else 0.0
    kinds = [(1, share)] * (share > 0) + [(2, 1 - share)] * (share < 1)
    seconds = sum(part * time_step(step, plan, number, device) for number, part in kinds)
    began = time.perf_counter()
    score(embedder, data.held_out, config.train.batch_size)
    return seconds, time.perf_counter() - began


def time_step(step: AnyStep, plan: BatchPlan, number: int, device: Device) -> float:
    """The median time of one kind of step; the first ones warm up, compile and record."""
    times: list[float] = []
    off = Stopwatch(device.synchronise, on=False)
    batch = plan.batch(1)  # the same for all: a recording is made once for each shape
    while len(times) < 12 and (sum(times) < 10 or len(times) < WARM_UP + 2):
        times.append(timed(lambda: step(batch, number, 0.0, off)(), device.synchronise))
    return statistics.median(times[1:] if device.is_cpu else times[WARM_UP + 1 :])


def build(config: Config, tokenizer: CharacterTokenizer, device: Device) -> tuple[AnyStep, Embedder]:
    """A fresh model with its optimiser, ready to step, and the same model ready to embed."""
    model = CLIP(config.model, seed=derived_seed(config.train.seed, "weights")).to(device.torch)
    step = make_step(model, config.train, device)
    embedder = Embedder(model, tokenizer, device)
    embedder.batch = min(embedder.batch, config.train.micro_batch or embedder.batch)  # what fits in memory at once
    return step, embedder


def assemble(
    run: Run, config: Config, data: DataSet, device: Device, built: tuple[AnyStep, Embedder], log: EventLog
) -> Training:
    """Everything a run works with, before its first step."""
    step, embedder = built
    plan = make_plan(config, data, embedder.tokenizer)
    return Training(run, config, data, plan, step, embedder, device, log)


def chosen_again(run: Run, config: Config) -> tuple[Config, Device]:
    """The device, threads and kernels a run began with: never chosen anew, because results depend on them."""
    try:
        device, _ = devices.choose_device(config.train.device)
        check_kernels(config.train, device)
    except ConfigError as error:
        raise RunError(f"{run.path} began on another machine: {error.message}", hint="lapclip train") from error
    devices.prepare(device, int(config.train.threads))
    # Runs from before there was a choice had torch's own forms. What can no longer be compiled runs uncompiled.
    plain = {"image_attention": "fused", "text_attention": "fused", "linear": "torch"}
    settled = {name: form for name, form in plain.items() if getattr(config.train, name) == AUTO}
    how, _ = devices.choose_compile(config.train.compile, device)
    return replace_in(config, "train", **settled, compile=how), device


def reopen(run: Run, saved: dict[str, Any], hooks: Hooks) -> tuple[Config, DataSet, CharacterTokenizer]:
    """The configuration and the data a run began with."""
    layer = Layer(str(run.settings), {section: saved.get(section, {}) for section in ("model", "data", "train")})
    fallbacks = Layer(str(run.events), {"train": changes_so_far(read_events(run.events))})
    config = build_config([layer, fallbacks], SHAPES)
    data = load_scenes(config.data, config.model.image_size, hooks.data_progress)
    if data.fingerprint != saved["run"].get("data_fingerprint"):
        raise RunError(
            f"The data is not what {run.path} began with; this lapclip draws other pictures.",
            hint=f"lapclip {saved['run'].get('lapclip')}, or lapclip train for a new run",
        )
    _, tokenizer = fit_vocabulary(config, data)
    return config, data, tokenizer


def work(training: Training, signals: Signals, began: float) -> Outcome:
    """Train to the end or to a signal, then score the best model."""
    training.stop_reason = signals.reason
    try:
        evaluation = persist(training, finish, build)
    except Exception as error:
        with suppress(LapclipError):
            training.log.append(events.Failed(step=training.progress.step, error=str(error) or type(error).__name__))
        raise
    done = training.progress
    return Outcome(
        run=str(training.run.path),
        state="stopped" if evaluation is None else "finished",
        seconds=time.perf_counter() - began,
        training_seconds=done.training_seconds,
        steps=done.step,
        pairs_per_second=_rate(training),
        peak_memory_bytes=training.device.peak_memory_bytes(),
        devices=training.step.model.places(),
        places=places_so_far(read_events(training.run.events)),
        evaluation=evaluation,
        stop_signal=signals.received if evaluation is None else None,
    )


def finish(training: Training) -> dict[str, Any]:
    """Score the best model on the split that chose nothing, and say that the run is over."""
    split, pairs = training.data.final
    embedder = load(training.run.path, training.device.kind)
    embedder.batch = training.embedder.batch
    evaluation = {"split": split, **score(embedder, pairs, training.config.train.batch_size)}
    training.log.append(
        events.Finished(
            step=training.progress.step,
            training_seconds=training.progress.training_seconds,
            pairs_per_second=_rate(training),
            peak_memory_bytes=training.device.peak_memory_bytes(),
            evaluation=evaluation,
            places=places_so_far(read_events(training.run.events)),
        )
    )
    return evaluation


@contextmanager
def _recording(run: Run, hooks: Hooks) -> Iterator[EventLog]:
    """The run's event log, with log.txt written beside it."""
    text = open(run.log, "a", encoding="utf-8")  # noqa: SIM115 (closed below, where a full disk must not raise)
    try:
        log = EventLog(run.events, LineWriter(text, every=10.0, clock=time.monotonic), *hooks.listeners)
        try:
            yield log
        finally:
            log.close()
    finally:
        with suppress(OSError):
            text.close()


def _resumed(training: Training, skipped: list[str]) -> events.Resumed:
    step = training.progress.step
    return events.Resumed(
        step=step,
        steps=training.steps,
        batch_size=training.config.train.batch_size,
        checkpoint=f"step-{step:08d}",
        skipped=skipped,
    )


def _started(training: Training, reasons: dict[str, str], notes: list[str]) -> events.Started:
    return events.Started(
        notes=notes,
        config=asdict(training.config),
        reasons=reasons,
        machine=facts.machine_facts(),
        versions={"lapclip": __version__, "torch": torch.__version__, "numpy": importlib.metadata.version("numpy")},
        commit=facts.source_commit(),
        devices=training.step.model.places(),
        steps=training.steps,
        steps_per_epoch=training.plan.steps_per_epoch,
        pairs={split: len(pairs) for split, pairs in training.data.splits.items()},
        parameters=count_parameters(training.step.model),
    )


def _rate(training: Training) -> float:
    pairs = training.progress.step * training.config.train.batch_size
    return pairs / training.progress.training_seconds if training.progress.training_seconds else 0.0

"""Turn a command into a run: start or resume it, see it to its end, and sum up."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lapclip import __version__
from lapclip.commands.run_setup import Hooks, build, fit_vocabulary, make_plan, prepare
from lapclip.config import AUTO, SECTIONS, Config, Layer, WorkConfig, build_config, replace_in
from lapclip.data.dataset import DataSet
from lapclip.data.loading import SCENES, load_data
from lapclip.data.pixels import View
from lapclip.data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from lapclip.data.training_images import save_seen
from lapclip.embedder import Embedder, load
from lapclip.errors import ConfigError, LapclipError, RunError
from lapclip.machine import devices, facts
from lapclip.machine.awake import kept_awake
from lapclip.machine.devices import Device
from lapclip.machine.notify import notify
from lapclip.machine.polite import Courtesy
from lapclip.machine.signals import Signals
from lapclip.model.clip import count_parameters
from lapclip.model.shapes import SHAPES
from lapclip.runs import events
from lapclip.runs.event_log import EventLog, read_events
from lapclip.runs.folder import FORMAT, Run, check_name, create_run, find_run
from lapclip.runs.heartbeat import Pulse
from lapclip.runs.messages import LineWriter, recall_text
from lapclip.runs.summary import tower_devices
from lapclip.training.cuda_graph import AnyStep
from lapclip.training.frozen_features import Kept, keep_features, with_features
from lapclip.training.initial_weights import foundation_at
from lapclip.training.loop import Training, save_model, score
from lapclip.training.probes import Looking, own_captions
from lapclip.training.recovery import changes_so_far, persist, restore
from lapclip.training.runs_at_work import others_at_work, own_sign
from lapclip.training.teacher import Lessons, lessons_again
from lapclip.training.trackers import check_tracker, trackers
from lapclip.tuning.choose_kernels import check_kernels

LONG_ENOUGH_TO_NOTIFY = 60.0
"""Seconds of a run from which on its end is said on the desktop."""


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
    data: str
    early: str
    places: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    start_evaluation: dict[str, Any] | None = None
    """How the trained model that it began with scores; None where there was none."""
    stop_signal: int | None = None

    @property
    def exit_status(self) -> int:
        """0, or 128 and the signal that ended the run."""
        return 128 + self.stop_signal if self.stop_signal else 0

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "stop_signal"}


def start(
    recipe: str, settings: list[str], minutes: float | None = None, name: str | None = None, hooks: Hooks = Hooks()
) -> Outcome:
    """Train from a recipe in a new run."""
    began = time.perf_counter()
    check_name(name, hooks.reserved)
    try:
        ready = prepare(recipe, settings, minutes, hooks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before the run began: there is nothing to resume.") from None
    recipe = ready.recipe
    about = {"format": FORMAT, "recipe": recipe, "lapclip": __version__, "data_fingerprint": ready.data.fingerprint}
    about |= {} if ready.tuned_seconds is None else {"tuned_seconds": ready.tuned_seconds}
    about |= {"teacher_digest": ready.lessons.digest} if ready.lessons else {}
    settled = {"run": about, **asdict(ready.config), "reasons": ready.reasons}
    run = create_run(name, recipe, settled, hooks.reserved)
    with at_work(run, ready.config.work), Signals() as signals, _recording(run, hooks, ready.config) as log:
        save_tokenizer(ready.built[1].tokenizer, run.tokenizer)
        save_seen(ready.data.train.identities, run.seen, ready.config.train.start)
        if ready.foundation:
            save_model(ready.built[1], run.start)
            ready.foundation.settle_in(run.start)
        training = assemble(run, ready.config, ready.data, ready.device, ready.built, log, ready.kept, ready.lessons)
        training.foundation = ready.foundation
        log.append(_started(training, ready.reasons, [*ready.notes, *competitors()], ready.tuned_seconds))
        del ready  # so that what a fallback replaces is gone
        return work(training, signals, began)


def resume(name: str | None, hooks: Hooks = Hooks()) -> Outcome:
    """Go on with a run from its newest good checkpoint."""
    began = time.perf_counter()
    run = find_run(name)
    saved = run.read_settings()
    with at_work(run, WorkConfig(**saved.get("work", {}))), Signals() as signals:
        run.clear_stop()  # first of all: a request made from now on is meant for this process
        if run.last_state() == "finished":
            raise RunError(f"{run.path} is finished; there is nothing to resume.", hint=f"lapclip eval {run.name}")
        config, data, tokenizer = reopen(run, saved, hooks)
        lessons = lessons_again(saved["run"].get("teacher_digest", ""), config, data, hooks.data_progress)
        check_tracker(config.work.track)
        config, device = chosen_again(run, config)
        foundation = foundation_at(run.start, config)
        built = build(config, tokenizer, device, foundation)
        kept = keep_features(*built, make_plan(config, data, tokenizer), data, config, hooks.data_progress)
        with _recording(run, hooks, config) as log:
            training = assemble(run, config, data, device, built, log, kept, lessons)
            training.foundation = foundation
            del built  # so that what a fallback replaces is gone
            skipped = restore(training)
            if skipped is None:
                # Killed before its first step: it starts again.
                log.append(_started(training, saved["reasons"], [], saved["run"].get("tuned_seconds")))
            else:
                log.append(_resumed(training, skipped))
            return work(training, signals, began)


def assemble(
    run: Run,
    config: Config,
    data: DataSet,
    device: Device,
    built: tuple[AnyStep, Embedder],
    log: EventLog,
    kept: Kept | None = None,
    lessons: Lessons | None = None,
) -> Training:
    """Everything a run works with, before its first step."""
    step, embedder = built
    plan = make_plan(config, data, embedder.tokenizer)
    plan.frozen, embedder = kept, with_features(embedder, kept, step)
    plan.teacher = lessons and lessons.rows
    looking = Looking(data.held_out, own_captions(config.work.ask), run.images)
    courtesy = Courtesy(config.work.battery) if config.work.polite else None
    return Training(run, config, data, plan, step, embedder, device, log, looking=looking, courtesy=courtesy)


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


def reopen(run: Run, saved: dict[str, Any], hooks: Hooks) -> tuple[Config, DataSet, Tokenizer]:
    """The configuration and the data a run began with."""
    layer = Layer(str(run.settings), {section: saved.get(section, {}) for section in SECTIONS})
    fallbacks = Layer(str(run.events), {"train": changes_so_far(read_events(run.events))})
    config = build_config([layer, fallbacks], SHAPES)
    data = load_data(config.data, View.of(config.model), hooks.data_progress)
    if data.fingerprint != saved["run"].get("data_fingerprint"):
        raise RunError(
            f"The data is not what {run.path} began with: {_what_changed(config)}.",
            hint="the images and captions as they were, or lapclip train for a new run",
        )
    # Learnt once: another release of what learns it might number the tokens otherwise.
    return config, data, load_tokenizer(run.tokenizer) or fit_vocabulary(config, data)[1]


def _what_changed(config: Config) -> str:
    if config.data.source == SCENES:
        return "this lapclip draws other images"
    return f"images, captions or splits in {config.data.source} have changed"


def work(training: Training, signals: Signals, began: float) -> Outcome:
    """Train to the end or to a signal, then score the best model."""
    training.stop_reason = signals.reason
    try:
        evaluation = persist(training, finish, rebuild)
    except Exception as error:
        with suppress(LapclipError):
            training.log.append(events.Failed(step=training.progress.step, error=str(error) or type(error).__name__))
        _say_it_is_over(training, "failed", began)
        raise
    done = training.progress
    if evaluation is not None:
        _say_it_is_over(training, f"finished: {recall_text(evaluation)}", began)
    return Outcome(
        run=str(training.run.path),
        state="stopped" if evaluation is None else "finished",
        seconds=time.perf_counter() - began,
        training_seconds=done.training_seconds,
        steps=done.step,
        pairs_per_second=_rate(training),
        peak_memory_bytes=training.device.peak_memory_bytes(),
        devices=training.step.model.tower_devices(),
        data=training.config.data.source,
        early=training.ended_early,
        places=tower_devices(read_events(training.run.events)),
        evaluation=evaluation,
        start_evaluation=training.start_evaluation,
        stop_signal=signals.received if evaluation is None else None,
    )


def rebuild(training: Training, tokenizer: Tokenizer) -> tuple[AnyStep, Embedder]:
    """The model and its optimiser once more, as a fallback needs them."""
    step, embedder = build(training.config, tokenizer, training.device, training.foundation)
    kept = training.plan.frozen
    return step, with_features(embedder, kept if isinstance(kept, Kept) else None, step)


def finish(training: Training) -> dict[str, Any]:
    """Score the best model on the split that chose nothing, and say that the run is over."""
    split, pairs = training.data.final
    embedder = load(training.run.path, training.device.kind)
    embedder.batch = training.embedder.batch
    evaluation = {"split": split, **score(embedder, pairs, training.config.train.batch_size)}
    training.start_evaluation = score_start(training)
    training.log.append(
        events.Finished(
            step=training.progress.step,
            training_seconds=training.progress.training_seconds,
            pairs_per_second=_rate(training),
            peak_memory_bytes=training.device.peak_memory_bytes(),
            evaluation=evaluation,
            start_evaluation=training.start_evaluation,
            places=tower_devices(read_events(training.run.events)),
            early=training.ended_early,
        )
    )
    return evaluation


def score_start(training: Training) -> dict[str, Any] | None:
    """The scores of the trained model that a run began with, on the same split; None where it began with new heads."""
    if not training.config.train.start:
        return None
    split, pairs = training.data.final
    embedder = load(training.run.start, training.device.kind)
    embedder.batch = training.embedder.batch
    kept = training.plan.frozen
    embedder = with_features(embedder, kept if isinstance(kept, Kept) else None, training.step)
    return {"split": split, **score(embedder, pairs, training.config.train.batch_size)}


@contextmanager
def at_work(run: Run, work: WorkConfig) -> Iterator[None]:
    """Work on a run alone, with a sign of life for others, on a machine that does not fall asleep."""
    signs = [run.pulse, own_sign()]
    with run.lock(), Pulse(signs, str(run.path.absolute())), kept_awake(wanted=work.keep_awake):
        run.has_started()
        yield


def competitors() -> list[str]:
    """A warning for each other run at work on this computer."""
    return [
        f"another run is at work on this computer, {beat.about}: both are slower than alone; --after waits for one here"
        for beat in others_at_work()
    ]


def _say_it_is_over(training: Training, how: str, began: float) -> None:
    """On the desktop, if someone may have turned to other things meanwhile."""
    if training.config.work.notify and time.perf_counter() - began > LONG_ENOUGH_TO_NOTIFY:
        notify(f"lapclip: {training.run.name}", how)


@contextmanager
def _recording(run: Run, hooks: Hooks, config: Config) -> Iterator[EventLog]:
    """The run's event log, with log.txt written beside it."""
    tracked = trackers(config.work.track, run.path)
    text = open(run.log, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (closed below, where a full disk must not raise)
    try:
        writer = LineWriter(text, every=10.0, clock=time.monotonic)
        log = EventLog(run.events, writer, *tracked, *hooks.listeners)
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
        notes=competitors(),
    )


def _started(
    training: Training, reasons: dict[str, str], notes: list[str], tuned_seconds: float | None
) -> events.Started:
    device = training.device
    held = facts.memory_bytes() if device.is_cpu else device.peak_memory_bytes()
    return events.Started(
        notes=notes,
        config=asdict(training.config),
        reasons=reasons,
        machine=facts.machine_facts(),
        versions={"lapclip": __version__, "torch": torch.__version__, "numpy": importlib.metadata.version("numpy")},
        commit=facts.source_commit(),
        devices=training.step.model.tower_devices(),
        steps=training.steps,
        steps_per_epoch=training.plan.steps_per_epoch,
        pairs={split: len(pairs) for split, pairs in training.data.splits.items()},
        captions={split: pairs.repeats() for split, pairs in training.data.splits.items()},
        parameters=count_parameters(training.step.model),
        tuned_seconds=tuned_seconds,
        memory_limit_bytes=held + device.free_bytes(),
    )


def _rate(training: Training) -> float:
    pairs = training.progress.step * training.config.train.batch_size
    return pairs / training.progress.training_seconds if training.progress.training_seconds else 0.0

"""`lapclip train`: a new run, from its settings to its end.

The way from the first step to the end is the same for a run that is resumed: train, fall back, score, and sum up.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapclip import __version__
from lapclip.commands.choose_recipe import SettledRecipe, check_early, request_config
from lapclip.commands.run_setup import (
    TRAIN_TOGETHER,
    Callbacks,
    RunSetup,
    build_again,
    cached_for_others,
    saved_settings,
    set_up,
    share_run_files,
    shared_by,
)
from lapclip.config import NEVER, Config, WorkConfig
from lapclip.data.batches import Batch
from lapclip.data.dataset import Pairs, save_seen
from lapclip.data.tokenizers import save_tokenizer
from lapclip.embedder import Embedder, load_torch
from lapclip.errors import LapclipError, LostRank, RunBusy, TrainingError
from lapclip.evaluation.calibration import calibrate, save_calibration
from lapclip.evaluation.hubness import draw_bank, read_bank, save_bank
from lapclip.evaluation.short_questions import (
    ShortQuestions,
    evaluate_short_questions,
    short_questions,
)
from lapclip.loss import LOSSES
from lapclip.machine import facts, system_memory
from lapclip.machine.desktop import Signals, kept_awake
from lapclip.machine.polite import PolitePauses, lower_priority
from lapclip.machine.ranks import ALONE, Ranks, job, under_torchrun
from lapclip.machine.system_memory import SwapWatch
from lapclip.measure.phases import Laps
from lapclip.model.clip import count_parameters
from lapclip.paths import open_own
from lapclip.runs import events
from lapclip.runs.events import Event, EventLog, mapping, read_events
from lapclip.runs.folder import Run, TrainRequest, check_name, create_run
from lapclip.runs.heartbeat import (
    Pulse,
    beat_of,
    write_beat,
)
from lapclip.runs.messages import LineWriter
from lapclip.runs.summary import tower_devices
from lapclip.together import invited_at, is_restarted, machines_wanted
from lapclip.training.checkpoint import keep_newest, list_checkpoints, save_model
from lapclip.training.cuda_graph import GraphedStep
from lapclip.training.frozen_features import with_features
from lapclip.training.loop import Training, score_embeddings
from lapclip.training.probes import ProbeCaptions, own_captions
from lapclip.training.recovery import persist
from lapclip.training.shards import own_batches, own_shards
from lapclip.training.trackers import trackers
from lapclip.training.worth import measure_together
from lapclip.weights import CONFIG, WEIGHTS


def train(
    recipe: str,
    settings: Sequence[str],
    minutes: float | None = None,
    name: str | None = None,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train from a recipe in a new run.

    Under torchrun this is for the rank that writes (`take_part` in commands/resume.py).
    """
    request = TrainRequest(recipe, tuple(settings), minutes)
    check_name(name)
    settled = check_early(request)
    run = create_run(name, settled.recipe, request)
    return begin(run, request, callbacks, ranks, settled=settled)


def begin(
    run: Run,
    request: TrainRequest,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
    *,
    settled: SettledRecipe | None = None,
    detached: bool = False,
) -> Outcome:
    """Choose the settings of a run and train it from its first step.

    The run may be new, or its start may have been interrupted before. `settled` is its recipe, if that
    was chosen already. A `detached` process leaves requests to stop alone: one that is there is for it.
    """
    began, laps = time.perf_counter(), Laps()
    with working_on(run), ExitStack() as stack:
        if run.settings.exists():
            raise RunBusy(f"Another process has just started {run.path}.", hint="lapclip runs")
        if not detached:
            run.clear_stop()
        with recording_failed_start(run):
            config = request_config(request)
            stack.enter_context(behaving(config.work))
            asked = request.recipe, request.settings, request.minutes
            setup = set_up(*asked, callbacks, ranks, laps, settled)
            save_start(run, setup)
        signals = stack.enter_context(stop_signals())
        log = stack.enter_context(recording(run, callbacks, setup.config))
        training = start_training(run, setup, log, ranks)
        notes = [*setup.notes, *company(run, ranks)]
        if setup.config.work.polite:
            notes.append(POLITE_NOTE)
        laps.lap("folder")
        log.append(started(training, setup, notes, laps))
        del setup  # so that what a fallback replaces is gone
        share_run(training)
        return run_to_end(training, signals, began, callbacks)


@contextmanager
def recording_failed_start(run: Run) -> Iterator[None]:
    """Write down why a run failed or was interrupted before its first step."""
    try:
        yield
    except KeyboardInterrupt:
        _record_end(run, events.Stopped(step=0, reason=INTERRUPTED_START))
        raise KeyboardInterrupt(
            f"Interrupted before the first step. Go on: {run.resume_command()}"
        ) from None
    except Exception as error:
        _record_end(run, events.Failed(step=0, error=str(error) or type(error).__name__))
        raise


def _record_end(run: Run, event: Event) -> None:
    with suppress(LapclipError, OSError), closing(EventLog(run.events)) as log:
        log.append(event)


def stop_signals() -> Signals:
    """Listens for signals that ask a run to stop."""
    return Signals(twice=under_torchrun())


def note_job(run: Run) -> None:
    """Leave word of which job of torchrun works on a run, and which process starts it again: one that it starts again
    goes on with the run, and until then someone may ask it to stop."""
    if under_torchrun():
        write_beat(run.job, beat_of(os.getppid(), job()))


def company(run: Run, ranks: Ranks) -> list[str]:
    """Who has gone or come since the run was last trained, and who is still missing, where several computers train."""
    if ranks is ALONE:
        return []
    now, before = Counter(ranks.hosts), Counter(ranks.hosts)
    for event in read_events(run.events):
        if event["type"] == "together":
            before = Counter(map(str, mapping(event.get("worth")).get("hosts") or []))
    gone, come = sorted((before - now).elements()), sorted((now - before).elements())
    notes = [f"goes on without {' and '.join(gone)}"] * bool(gone) + [
        f"{' and '.join(come)} joined"
    ] * bool(come)
    if ranks.many and not notes and run.events.exists():
        notes = [f"trained by {' and '.join(ranks.hosts)}"]
    if ranks.count < machines_wanted():
        notes.append(
            f"{ranks.count} of {machines_wanted()} computers are here; the others may join again"
        )
    return notes


def share_run(training: Training) -> None:
    """Give the other ranks what a run is resumed from: `follow` has them go on from there as this one does."""
    run, ranks = training.run, training.ranks
    if ranks is ALONE:
        return
    if not ranks.many:
        ranks.connect(training.device.collectives)
        return
    if not list_checkpoints(run.checkpoints):
        training.save()
    ranks.connect(training.device.collectives)
    newest = list_checkpoints(run.checkpoints)[-1]
    folders = [folder for folder in (run.start, newest) if folder.exists()]
    files = [
        run.settings,
        run.tokenizer,
        *(path for folder in folders for path in sorted(folder.iterdir())),
    ]
    # With what fallbacks have changed since the run began, which run.toml does not have.
    settings = asdict(training.config.train)
    if training.features is None or training.features.is_empty:  # then the others take none, either
        settings["features"] = NEVER
    task = {"task": TRAIN_TOGETHER, "run": run.name, "base": str(run.base), "train": settings}
    ranks.from_writer(task, "set-up")
    digest = str(run.read_settings()["run"].get("teacher_digest", ""))
    cached = cached_for_others(digest, training.config, training.data)
    share_run_files(run, [path for path in files if path.is_file()], ranks, cached)
    training.agree_on_progress()
    check_same_start(training)
    measure(training)


def check_same_start(training: Training) -> None:
    """Ranks that began with other weights or other batches than the writer would train another model without anyone
    noticing."""
    digest = hashlib.sha256()
    for parameter in training.step.model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    batch = next_batch(training)
    tokens = hashlib.sha256(batch.tokens_BL.tobytes() + batch.positives_BB.tobytes())
    own = {"weights": digest.hexdigest(), "batches": tokens.hexdigest()}
    theirs = training.ranks.from_writer(own, "digest of weights and batches")
    if other := [name for name in own if own[name] != theirs[name]]:
        raise TrainingError(
            f"Rank {training.ranks.rank} has other {' and '.join(other)} than the rank that writes.",
            hint="the same releases of lapclip and torch on all computers",
        )


def next_batch(training: Training) -> Batch:
    """The batch of the next step, with the images of this rank's own shards alone: others need not be read here. A rank
    without shards has them all, to be timed with."""
    shards, ranks = training.config.train.shards, training.ranks
    plan = (
        own_batches(training.plan, shards, ranks)
        if own_shards(ranks, shards or ranks.count)
        else training.plan
    )
    return plan.batch(min(training.progress.step + 1, training.steps))


def measure(training: Training) -> None:
    """Before ranks train together, find out how fast that will be, and deal the shards by the speed of each."""
    ranks, train, step = training.ranks, training.config.train, training.step
    if isinstance(step, GraphedStep):
        return
    batch = (
        training.plan.batch(min(training.progress.step + 1, train.steps))
        if ranks.writes
        else next_batch(training)
    )
    worth = measure_together(step, batch, train, training.device, ranks)
    ranks.speeds, ranks.overlaps = worth.shards, worth.overlaps
    ranks.sent_bytes, ranks.waited_seconds = 0, 0.0  # of what follows
    training.log.append(
        events.Together(
            step=training.progress.step, worth=worth.to_dict(), text=worth.line(train.batch_size)
        )
    )
    if ranks.writes:
        wanted = machines_wanted()  # so that others know how the run is gone on with
        invited = {"machines": wanted, "address": invited_at()} if wanted else {}
        training.run.record("together", worth.to_dict() | invited)


def record_truth(training: Training) -> None:
    """Put how long the steps of several ranks took beside what was predicted."""
    taken, run = training.step_seconds[SLOW_STEPS:], training.run
    predicted = run.read_settings().get("together")
    if taken and predicted:
        run.record("together", predicted | {"step_seconds": statistics.median(taken)})


def save_start(run: Run, setup: RunSetup) -> None:
    """Put into the run's folder what it needs to be resumed, and what it has seen. The settings come last."""
    save_tokenizer(setup.tokenizer, run.tokenizer)
    save_seen(setup.data.train.identities, run.seen, setup.config.train.start)
    save_bank(draw_bank(setup.data.train.captions), run.questions)
    note_job(run)
    if setup.initial_weights:
        save_model(setup.embedder, run.start)
        setup.initial_weights.read_from(run.start)
    run.write_settings(saved_settings(setup))


ENOUGH_TO_CALIBRATE, STEPS_TO_CALIBRATE = 100, 100
"""Images that choose the best model, and steps of a run, from which on it also measures what its scores are worth, for
search; of other runs `lapclip eval` does."""
INTERRUPTED_START = "interrupted before its first step"
POLITE_NOTE = "polite: low priority; pauses on a low battery, under heat and while swap grows"
SLOW_STEPS = 2
"""Steps at the beginning that are slower than the others."""


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
    best_step: int
    """The step of the model that is kept, which `evaluation` scores."""
    early: str
    places: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    start_evaluation: dict[str, Any] | None = None
    """How the trained model that it began with scores; None where there was none."""
    short_questions: dict[str, Any] | None = None
    """How well words and phrases find their images; None where there are too few."""
    signal: int | None = None
    """The signal that asked the run to end, perhaps when nothing was left to stop."""

    @property
    def exit_status(self) -> int:
        """0, or 128 and the signal that ended the run."""
        return 128 + self.signal if self.signal and self.state == "stopped" else 0

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "signal"}


@contextmanager
def working_on(run: Run) -> Iterator[None]:
    """Work on a run alone, with a sign of life for others."""
    beats = Pulse(run.pulse, str(run.path.absolute()))
    with run.lock(), beats:
        yield


@contextmanager
def behaving(work: WorkConfig) -> Iterator[None]:
    """Keep the machine awake and lower the priority of this process, as the settings say."""
    if work.polite:
        lower_priority()
    with kept_awake(wanted=work.keep_awake):
        yield


@contextmanager
def recording(run: Run, callbacks: Callbacks, config: Config) -> Iterator[EventLog]:
    """The run's event log, with log.txt written beside it."""
    tracked = trackers(config.work.track, run.path)
    text = open_own(run.log, "a", encoding="utf-8", errors="backslashreplace")
    try:
        writer = LineWriter(text, every=10.0, clock=time.monotonic)
        log = EventLog(run.events, writer, *tracked, *callbacks.listeners)
        try:
            yield log
        finally:
            log.close()
    finally:
        with suppress(OSError):
            text.close()


def start_training(
    run: Run, setup: RunSetup, log: EventLog, ranks: Ranks = ALONE, kind: type[Training] = Training
) -> Training:
    """A run's set-up in its folder, before its first step, on this rank."""
    work = setup.config.work
    shared_by(setup.step, ranks)
    return kind(
        run=run,
        config=setup.config,
        data=setup.data,
        plan=setup.plan,
        step=setup.step,
        embedder=setup.embedder,
        device=setup.device,
        log=log,
        initial_weights=setup.initial_weights,
        features=setup.features,
        probes=ProbeCaptions(setup.data.held_out, own_captions(work.ask), run.images),
        polite_pauses=PolitePauses(work.battery) if work.polite and ranks.writes else None,
        ranks=ranks,
        swap=None
        if ranks.many
        else SwapWatch(),  # a fallback of one rank alone would part it from the others
    )


def run_to_end(training: Training, signals: Signals, began: float, callbacks: Callbacks) -> Outcome:
    """Train to the end or to a signal, then score the best model."""
    training.stop_reason = lambda: signals.reason() or callbacks.stop_reason()
    try:
        evaluation = persist(training, finish, build_again)
        if evaluation is None:
            training.ranks.check_stop(training.stopped_by)
    except Exception as error:
        if isinstance(
            error, LostRank
        ):  # ranks wait for each other before an update or after it: it is never half-done
            with suppress(Exception):
                training.save()
        text = error.message if is_restarted(error) and isinstance(error, LostRank) else str(error)
        with suppress(LapclipError):
            training.log.append(
                events.Failed(step=training.progress.step, error=text or type(error).__name__)
            )
        raise
    record_truth(training)
    done = training.progress
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
        best_step=done.best_step,
        early=training.ended_early,
        places=tower_devices(read_events(training.run.events)),
        evaluation=evaluation,
        start_evaluation=training.start_evaluation,
        short_questions=training.short_questions,
        signal=signals.received,
    )


Vectors = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Embeddings of images and of captions, and each caption's image."""


@dataclass(frozen=True)
class Final:
    """The best model, and what is scored at the end of a run."""

    best: Embedder
    embedded: Vectors
    questions: ShortQuestions | None
    asked_QE: np.ndarray | None
    """The embeddings of the questions."""
    start_embedded: Vectors | None
    """What a trained start makes of the same pairs; None for a run that began with new heads."""


def embed_final(training: Training) -> Final:
    """Embed the split that chose nothing with the best model, and with a trained start as well. Several ranks do so in
    shares, for which the one that writes gives the best model to the others."""
    run, ranks, pairs = training.run, training.ranks, training.data.final[1]
    ranks.share_files(run.path, [run.model / WEIGHTS, run.model / CONFIG])
    best = ranks.all_or_none(lambda: _load(training, run.path))
    best.ranks = ranks
    embedded, asked = best.encode_pairs(pairs), _short_questions(training, best, pairs)
    best.ranks, start_embedded = ALONE, None
    if training.config.train.start:
        start = ranks.all_or_none(lambda: _load(training, run.start))
        start = with_features(start, training.features, training.step)
        start.ranks = ranks
        start_embedded = start.encode_pairs(pairs)
    return Final(best, embedded, *asked, start_embedded)


def finish(training: Training) -> dict[str, Any]:
    """Score the best model, and a trained start as well; record the end."""
    final, split = embed_final(training), training.data.final[0]
    training.ranks.close()
    training.ranks = ALONE  # the others have done all there was for them to do
    best, embedded, questions, asked_QE = (
        final.best,
        final.embedded,
        final.questions,
        final.asked_QE,
    )
    evaluation = _scores(training, embedded)
    if questions and asked_QE is not None:
        training.short_questions = evaluate_short_questions(embedded[0], asked_QE, questions)
    if final.start_embedded:
        training.start_evaluation = _scores(training, final.start_embedded)
    training.log.append(
        events.Finished(
            step=training.progress.step,
            training_seconds=training.progress.training_seconds,
            pairs_per_second=_rate(training),
            peak_memory_bytes=training.device.peak_memory_bytes(),
            evaluation=evaluation,
            start_evaluation=training.start_evaluation,
            short_questions=training.short_questions,
            places=tower_devices(read_events(training.run.events)),
            best_step=training.progress.best_step,
            early=training.ended_early,
        )
    )
    keep_newest(
        training.run.checkpoints, 1
    )  # nothing can go wrong any more for which another would be needed
    if _is_to_be_calibrated(training):
        if split != "val":
            embedded = best.encode_pairs(training.data.held_out)
        _calibrate(training, best, embedded)
    return evaluation


def _load(training: Training, folder: Path) -> Embedder:
    embedder = load_torch(folder, training.device.kind)
    embedder.batch = training.embedder.batch
    return embedder


def _scores(training: Training, embedded: Vectors) -> dict[str, Any]:
    batch_size = training.config.train.batch_size
    has_classes = bool(
        training.data.classes
    )  # many images share a caption, so R@1 stays low for a perfect model
    scores = score_embeddings(*embedded, batch_size, among_1000=not has_classes)
    return {"split": training.data.final[0], **scores}


def _short_questions(
    training: Training, embedder: Embedder, pairs: Pairs
) -> tuple[ShortQuestions | None, np.ndarray | None]:
    """Words and phrases of the captions, with their vectors; nothing where captions are the names of classes."""
    questions = None if training.data.classes else short_questions(pairs.captions)
    return questions, embedder.encode_text(questions.texts) if questions else None


def _is_to_be_calibrated(training: Training) -> bool:
    enough = (
        len(training.data.held_out) >= ENOUGH_TO_CALIBRATE
        and training.progress.step >= STEPS_TO_CALIBRATE
    )
    return enough and not training.data.classes


def _calibrate(training: Training, best: Embedder, embedded: Vectors) -> None:
    """Measure the correction for hubness that search uses, on the pairs that chose the model.

    The pairs of another final split choose nothing.
    """
    if not all(np.isfinite(vectors).all() for vectors in embedded[:2]):
        return
    bank = read_bank(training.run.questions) or draw_bank(training.data.train.captions)
    calibration, _ = calibrate(best, bank, *embedded)
    save_calibration(calibration, training.run.calibration)


def started(training: Training, setup: RunSetup, notes: list[str], laps: Laps) -> events.Started:
    """The event that begins a run."""
    device, train = training.device, training.config.train
    held = system_memory.memory_bytes() if device.is_cpu else device.peak_memory_bytes()
    return events.Started(
        notes=notes,
        config=asdict(training.config),
        reasons=setup.reasons,
        machine=facts.machine_facts(),
        versions={
            "lapclip": __version__,
            "torch": torch.__version__,
            "numpy": importlib.metadata.version("numpy"),
        },
        commit=facts.source_commit(),
        devices=training.step.model.tower_devices(),
        steps=training.steps,
        steps_per_epoch=training.plan.steps_per_epoch,
        pairs={split: len(pairs) for split, pairs in training.data.splits.items()},
        captions={split: pairs.repeats() for split, pairs in training.data.splits.items()},
        parameters=count_parameters(training.step.model),
        tuned_seconds=setup.tuned_seconds,
        memory_limit_bytes=held + device.free_bytes(),
        chance_loss=LOSSES[train.loss].chance(train.batch_size),
        set_up_seconds=dict(laps.seconds),
        hardware={device.kind: device.label},
    )


def _rate(training: Training) -> float:
    pairs = training.progress.step * training.config.train.batch_size
    return pairs / training.progress.training_seconds if training.progress.training_seconds else 0.0

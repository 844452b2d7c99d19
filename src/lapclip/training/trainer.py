"""The trainer of a run: its steps in order, with evaluations, checkpoints and events.

`Trainer.create` prepares a new run, `Trainer.resume` an earlier one, and `fit` trains it to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lapclip.config import FSDP, Config, replace_in
from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.dataset import DataSet
from lapclip.data.tokenizers import Tokenizer
from lapclip.embedder import Embedder
from lapclip.errors import RunError
from lapclip.machine.choose_device import device_of, prepare_device
from lapclip.machine.device import Device
from lapclip.machine.polite import PolitePauses
from lapclip.machine.sensors import Sensors
from lapclip.machine.system_memory import SwapWatch
from lapclip.measure.phases import Laps, Stopwatch, measures_phases
from lapclip.runs import events
from lapclip.runs.events import Event, EventLog, read_events
from lapclip.runs.folder import Run
from lapclip.training import checkpoint, final_scores, ranks_in_a_run, run_record
from lapclip.training.checkpoint import Progress
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.feed import feed
from lapclip.training.final_scores import FinalScores
from lapclip.training.frozen_features import CachedFeatures, with_features
from lapclip.training.held_out_scores import evaluate_held_out
from lapclip.training.initial_weights import InitialWeights
from lapclip.training.inputs import Sent
from lapclip.training.outcome import TrainOutcome
from lapclip.training.pauses import check_swap, pause_if_polite
from lapclip.training.preparation import prepare, prepare_again
from lapclip.training.probes import ProbeCaptions, own_captions
from lapclip.training.recovery import Change, NumberCheck, decide, train_with_recovery
from lapclip.training.request import Callbacks, RunRequest
from lapclip.training.run_parts import RunParts, build
from lapclip.training.run_process import recording, stop_signals
from lapclip.training.schedule import (
    is_checkpoint_due,
    is_evaluation_due,
    is_out_of_patience,
    learning_rate,
)
from lapclip.training.step import StepMetrics, TrainStep


@dataclass(frozen=True)
class PendingStep:
    """A step whose metrics are not read yet: reading them at once would make the device wait."""

    number: int
    lr: float
    read_metrics: Callable[[], StepMetrics]
    watch: Stopwatch


@dataclass
class Trainer:
    """A run that is ready to train, or in training. `progress` is how far it is."""

    run: Run
    config: Config
    data: DataSet
    plan: BatchPlan
    tokenizer: Tokenizer
    device: Device
    step: TrainStep
    """The model with its optimizer."""
    embedder: Embedder
    """The same model, to score it."""
    initial_weights: InitialWeights | None
    """Weights that training started from. None for random initialization."""
    features: CachedFeatures | None
    """Cached features of the frozen part. None if nothing is frozen."""
    probes: ProbeCaptions
    polite_pauses: PolitePauses | None
    """None for a run that never pauses."""
    swap_watch: SwapWatch | None
    """None if nothing is left that would help against swapping."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    ranks: Ranks = ALONE
    progress: Progress = field(default_factory=Progress)
    sensors: Sensors = field(default_factory=Sensors)
    numbers: NumberCheck = field(default_factory=NumberCheck)
    rank_reports: ranks_in_a_run.RankReports = field(default_factory=ranks_in_a_run.RankReports)
    began: float = field(default_factory=time.perf_counter)
    """When preparation began."""
    stop_reason: Callable[[], str | None] = lambda: None
    """Reason to stop that a signal or the caller gave."""
    stopped_by: str = ""
    """Reason for stopping before the last step, for example "SIGTERM"."""
    ended_early: str = ""
    """Reason for ending before the last step because scores no longer rise."""
    pending: PendingStep | None = None
    first_event: Event = field(init=False)
    log: EventLog = field(init=False)

    @classmethod
    def create(
        cls,
        run: Run,
        request: RunRequest,
        callbacks: Callbacks = Callbacks(),
        ranks: Ranks = ALONE,
    ) -> Trainer:
        """Prepare a new run, and write into its folder what it needs to be resumed."""
        began, laps = time.perf_counter(), Laps()
        parts = prepare(request, callbacks, ranks, laps)
        run_record.save_start(run, parts)
        trainer = cls.of_parts(run, parts, callbacks, ranks)
        trainer.began = began
        laps.lap("folder")
        trainer.first_event = run_record.started_event(trainer, parts, laps)
        return trainer

    @classmethod
    def resume(
        cls,
        run: Run,
        saved: dict[str, Any],
        callbacks: Callbacks = Callbacks(),
        ranks: Ranks = ALONE,
    ) -> Trainer:
        """Prepare a run from its folder, at its newest checkpoint. `saved` is its run.toml."""
        began, laps = time.perf_counter(), Laps()
        parts = prepare_again(run, saved, callbacks.data_progress, ranks)
        trainer = cls.of_parts(run, parts, callbacks, ranks)
        trainer.began = began
        skipped = trainer.load_newest()
        laps.lap("set-up")
        if skipped is None:  # killed before its first step
            trainer.first_event = run_record.started_event(trainer, parts, laps)
        else:
            trainer.first_event = run_record.resumed_event(trainer, skipped)
        return trainer

    @classmethod
    def of_parts(
        cls,
        run: Run,
        parts: RunParts,
        callbacks: Callbacks = Callbacks(),
        ranks: Ranks = ALONE,
    ) -> Trainer:
        """Return the trainer of a run that was prepared, before its first step."""
        work = parts.config.work
        is_polite = work.polite and ranks.writes
        return cls(
            run=run,
            config=parts.config,
            data=parts.data,
            plan=parts.plan,
            tokenizer=parts.tokenizer,
            device=parts.device,
            step=parts.step,
            embedder=parts.embedder,
            initial_weights=parts.initial_weights,
            features=parts.features,
            probes=ProbeCaptions(parts.data.held_out, own_captions(work.ask), run.images),
            polite_pauses=PolitePauses(work.battery) if is_polite else None,
            swap_watch=SwapWatch() if ranks.count == 1 else None,  # one rank cannot change alone
            callbacks=callbacks,
            ranks=ranks,
        )

    @property
    def steps(self) -> int:
        return self.config.train.steps

    def fit(self) -> TrainOutcome:
        """Train to the end or until the run is stopped, and score the best model."""
        signals, callbacks = stop_signals(), self.callbacks
        with signals, recording(self.run, callbacks, self.config) as log:
            self.log = log
            try:
                log.append(self.first_event)
                ranks_in_a_run.share_start(self)
                self.stop_reason = lambda: signals.reason() or callbacks.stop_reason()
                scores = self.run_to_end()
            except Exception as error:
                run_record.record_failure(self, error)
                raise
            seconds = time.perf_counter() - self.began
            return run_record.outcome_of(self, scores, seconds, signals.received)

    def run_to_end(self) -> FinalScores | None:
        """Train and score, and recover from failures. None if the run was stopped."""
        scores = train_with_recovery(self)
        if scores is None:
            ranks_in_a_run.check_stop(self)
        return scores

    def train(self) -> FinalScores | None:
        """Take the steps that are left, then score the best model. None if the run was stopped."""
        if not checkpoint.list_checkpoints(self.run.checkpoints):
            self.save()
        if self.progress.step == self.steps and not self.progress.best_step:
            self.evaluate(self.steps)  # its best model is gone
        if self.is_out_of_patience(self.progress.step):
            self.end_early()  # it was stopped where it would have ended
            return self.finish()
        first, threads = self.progress.step + 1, int(self.config.train.loader_threads)
        with feed(self.plan, self.step, first, self.steps, threads) as batches:
            self.take_steps(batches)
        if self.stopped_by:
            return None
        return self.finish()

    def take_steps(self, batches: Iterator[Batch | Sent]) -> None:
        """Take a step with each batch, then evaluate, save, stop or pause if that is due."""
        train, steps_per_epoch = self.config.train, self.plan.steps_per_epoch
        last_saved = time.perf_counter()
        began = last_saved - self.progress.training_seconds
        for number in range(self.progress.step + 1, self.steps + 1):
            step_began, waited_before = time.perf_counter(), self.ranks.waiting_seconds
            self.take_step(number, batches)
            self.advance(step=number, training_seconds=time.perf_counter() - began)
            seconds = time.perf_counter() - last_saved
            is_due = is_checkpoint_due(number, seconds, train, steps_per_epoch)
            reason, is_due = self.ranks.agree_on_stop(self.why_stop(), is_save_due=is_due)
            waited = self.ranks.waiting_seconds - waited_before
            self.rank_reports.record(self, number, time.perf_counter() - step_began, waited)
            if is_evaluation_due(number, train, steps_per_epoch):
                self.evaluate(number)
            if reason or is_due:
                self.advance(training_seconds=time.perf_counter() - began)
                self.save()
                last_saved = time.perf_counter()
            if reason:
                self.log.append(events.Stopped(step=number, reason=reason))
                self.stopped_by = reason
                return
            if self.is_out_of_patience(number):
                self.end_early()
                break
            check_swap(self)
            began += pause_if_polite(self)
        self.advance(training_seconds=time.perf_counter() - began)

    def take_step(self, number: int, batches: Iterator[Batch | Sent]) -> None:
        """Take one step, and record the one before it."""
        self.step.touched = False  # the state is complete until the optimizer begins
        watch = Stopwatch(self.device.synchronise, on=measures_phases(number))
        with watch.phase("load"):
            batch = next(batches)
        lr = learning_rate(number, self.steps, self.config.train)
        read_metrics = self.step(batch, number, lr, watch)
        self.record_pending()
        self.pending = PendingStep(number, lr, read_metrics, watch)

    def record_pending(self) -> None:
        """Read and record the metrics of the last step. Raises TrainingError if they are not numbers."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        metrics = pending.read_metrics()
        overflowed = self.numbers.overflowed(metrics, self, pending.number)
        run_record.record_step(self, pending, metrics, overflowed=overflowed)

    def why_stop(self) -> str | None:
        """Return why the run should save and stop now, or None."""
        reason = self.stop_reason()
        if reason is None and self.run.stop_asked():
            reason = "lapclip stop"
        return reason

    def is_out_of_patience(self, number: int) -> bool:
        """Return whether the scores have not risen for so many evaluations that the rest would only overfit."""
        train, steps_per_epoch = self.config.train, self.plan.steps_per_epoch
        best_step = self.progress.best_step
        return bool(best_step) and is_out_of_patience(number, best_step, train, steps_per_epoch)

    def end_early(self) -> None:
        """Note why the run takes no more steps."""
        self.ended_early = f"no better score since step {self.progress.best_step:,}"

    def evaluate(self, number: int) -> None:
        """Score the held-out pairs, and save the model if it is the best so far."""
        self.record_pending()
        evaluate_held_out(self, number)

    def finish(self) -> FinalScores:
        """Score the best model on the final split, and record the end of the run."""
        if not self.ranks.writes:
            return FinalScores({})  # the rank that writes has them
        vectors = final_scores.embed_final(self)
        scores = final_scores.compute_final_scores(self, vectors)
        run_record.record_end(self, scores)
        checkpoint.keep_newest(
            self.run.checkpoints, 1
        )  # another was needed only in case of a failure
        final_scores.calibrate_search(self, vectors)
        return scores

    def save(self) -> None:
        """Write a checkpoint of a state whose metrics are known to be numbers."""
        self.record_pending()
        began, step = time.perf_counter(), self.step
        path = checkpoint.save_checkpoint(
            self.run.checkpoints,
            step.model,
            step.optimizer,
            self.progress,
            step.others,
            self.ranks,
        )
        if path is None:
            return  # the writer has it
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - began
        self.log.append(
            events.Checkpoint(step=self.progress.step, path=path.name, bytes=size, seconds=seconds)
        )

    def is_saved(self) -> bool:
        """Return whether the newest checkpoint is of the last step."""
        checkpoints = checkpoint.list_checkpoints(self.run.checkpoints)
        return bool(checkpoints) and checkpoints[-1].name == f"step-{self.progress.step:08d}"

    def load_newest(self) -> list[str] | None:
        """Load the newest good checkpoint, and return what was wrong with newer ones.

        None if the run took no step yet and has no checkpoint.
        """
        run, step = self.run, self.step
        progress, skipped = checkpoint.load_newest(
            run.checkpoints, step.model, step.optimizer, step.others
        )
        if progress is not None:
            self.progress = checkpoint.with_best_of(progress, run.model)
            return skipped
        if any(event["type"] == "step" for event in read_events(run.events)):
            detail = f" ({'; '.join(skipped)})" if skipped else ""
            raise RunError(
                f"{run.path} has no good checkpoint left{detail}.",
                hint=f"a new run: {run.train_again()}",
            )
        return None

    def decide(self, error: Exception) -> Change | None:
        """Return what to change after a failure, or None if nothing would help."""
        if self.ranks.count > 1:
            return None  # torchrun starts all ranks again
        return decide(error, self.config.train, self.progress.step + 1)

    def drop_model(self) -> None:
        """Free the model and its optimizer before they are built again: both may not fit."""
        del self.step, self.embedder
        self.pending = None  # its step will be taken again
        self.numbers.reset()

    def rebuild(self, settings: dict[str, Any]) -> None:
        """Build the model and its optimizer again with changed settings of `train`."""
        self.config = replace_in(self.config, "train", **settings)
        train = self.config.train
        if train.device != self.device.kind:
            self.device = device_of(train.device)
        prepare_device(self.device, int(train.threads))
        ranks = self.ranks if train.parallel == FSDP else ALONE
        self.step, embedder = build(
            self.config, self.tokenizer, self.device, self.initial_weights, ranks
        )
        self.step.ranks = self.ranks
        self.embedder = with_features(embedder, self.features, self.step)

    def advance(self, **changes: Any) -> None:
        """Change `progress`."""
        self.progress = replace(self.progress, **changes)

"""The training loop: batches, steps, schedule, evaluations, events and checkpoints, in order."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lapclip.config import AUTO, Config, TrainConfig
from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.dataset import DataSet, Pairs
from lapclip.embedder import Embedder
from lapclip.errors import TrainingError
from lapclip.evaluation.retrieval import in_batches, retrieval
from lapclip.evaluation.zeroshot import accuracy
from lapclip.machine import system_memory
from lapclip.machine.device import Device
from lapclip.machine.polite import PolitePauses
from lapclip.machine.ranks import ALONE, Ranks
from lapclip.machine.sensors import Sensors
from lapclip.machine.system_memory import SwapWatch
from lapclip.measure.phases import Stopwatch, measures_phases
from lapclip.prompts import class_embeddings, read_templates
from lapclip.runs import events
from lapclip.runs.events import EventLog
from lapclip.runs.folder import Run
from lapclip.runs.trend import deciding_score
from lapclip.training.checkpoint import Progress, list_checkpoints, save_checkpoint, save_model
from lapclip.training.fallback import SwapGrew
from lapclip.training.feed import feed
from lapclip.training.frozen_features import CachedFeatures
from lapclip.training.initial_weights import InitialWeights
from lapclip.training.inputs import Sent
from lapclip.training.probes import ProbeCaptions
from lapclip.training.schedule import cheap_steps, learning_rate
from lapclip.training.shards import own_batches, own_shards
from lapclip.training.step import StepMetrics, TrainStep

MEMORY_EVERY = 50
RANKS_EVERY = 5.0
"""Seconds between two words about how the ranks fare."""
PAUSE_CHECK = 1.0
"""Seconds between two checks of a run that waits."""
OVERFLOWS = 30
"""Updates in a row that float16 may leave out: by then the scale of the loss has fallen by 2^30."""


@dataclass
class Training:
    """Everything a run works with. `progress` is where it stands."""

    run: Run
    config: Config
    data: DataSet
    plan: BatchPlan
    step: TrainStep
    embedder: Embedder
    device: Device
    log: EventLog
    initial_weights: InitialWeights | None
    """What the model started from; None where that was random weights."""
    features: CachedFeatures | None
    """The frozen features that the plan and the embedder take; None where nothing is frozen."""
    probes: ProbeCaptions
    """Follows the answers to a few captions."""
    polite_pauses: PolitePauses | None
    """Says when a polite run should wait; None for a run that never waits."""
    ranks: Ranks = ALONE
    """Who trains the same model: this one writes, others follow."""
    progress: Progress = field(default_factory=Progress)
    sensors: Sensors = field(default_factory=Sensors)
    stop_reason: Callable[[], str | None] = lambda: None
    swap: SwapWatch | None = field(default_factory=SwapWatch)
    """None where nothing is left that would help against swapping."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the steps that this process has taken together with others."""
    stopped_by: str = ""
    """Who or what stopped the run, where that was."""
    ended_early: str = ""
    """Why the run ended before its last step, where it did."""
    start_evaluation: dict[str, Any] | None = None
    """How the trained model that it began with scores, known at the end."""
    short_questions: dict[str, Any] | None = None
    """How well words find their images, known at the end."""
    _overflows: int = 0
    _ranks_seen: tuple[float, list[tuple[float, int]]] = field(
        default_factory=lambda: (time.perf_counter(), [])
    )
    """When the ranks were last written about, and how they had fared by then."""
    pending: tuple[int, float, Callable[[], StepMetrics], Stopwatch] | None = None

    @property
    def steps(self) -> int:
        return self.config.train.steps

    def train(self) -> str | None:
        """Go on to the last step. Returns why it ended early, or None."""
        if not list_checkpoints(self.run.checkpoints):
            self.save()
        if self.progress.step == self.steps and not self.progress.best_step:
            self.evaluate(self.steps)  # its best model is gone
            self.agree_on_progress()
        if self.progress.best_step and self.out_of_patience(
            self.progress.step
        ):  # it was stopped at that step
            self.end_early()
            return None
        loaders = self.config.train.loader_threads
        threads = 1 if loaders == AUTO else int(loaders)
        self.plan = own_batches(self.plan, self.config.train.shards, self.ranks)
        with feed(self.plan, self.step, self.progress.step + 1, self.steps, threads) as batches:
            return self._take_steps(batches)

    def _take_steps(self, batches: Iterator[Batch | Sent]) -> str | None:
        """Take a step with each batch, and do all that is due after it. Returns why it ended early, or None."""
        began, before = time.perf_counter(), self.progress.training_seconds
        last_saved = began
        for number in range(self.progress.step + 1, self.steps + 1):
            self.step.touched = False  # until the optimiser begins, all is as the last step left it
            taken = time.perf_counter()
            watch = Stopwatch(self.device.synchronise, on=measures_phases(number))
            with watch.phase("load"):
                batch = next(batches)
            lr = learning_rate(number, self.steps, self.config.train)
            read_metrics = self.step(batch, number, lr, watch)
            self.record_pending()  # the step before: reading this one's loss now would make the device wait
            self.pending = (number, lr, read_metrics, watch)

            self._advance(step=number, training_seconds=before + time.perf_counter() - began)
            reason = self.ranks.agreed(
                self.stop_reason() or ("lapclip stop" if self.run.stop_asked() else None)
            )
            if self.ranks.many:
                self.step_seconds.append(time.perf_counter() - taken)
                self.record_ranks(number)
            if self.evaluation_due(number):
                self.evaluate(number)
                self.agree_on_progress()
            if reason or self.checkpoint_due(number, time.perf_counter() - last_saved):
                self._advance(training_seconds=before + time.perf_counter() - began)
                self.save()
                last_saved = time.perf_counter()
            if reason:
                self.log.append(events.Stopped(step=number, reason=reason))
                self.stopped_by = reason
                return reason
            if self.out_of_patience(number):
                self.end_early()
                break
            self.check_swap(number)
            began += self.wait_for_others(number)
        self._advance(training_seconds=before + time.perf_counter() - began)
        return None

    def record_pending(self) -> None:
        """Read and write down the metrics of the last step; end the run if they are not numbers."""
        if self.pending is None:
            return
        number, lr, read_metrics, watch = self.pending
        self.pending = None
        metrics = read_metrics()
        # In float16 an update whose gradient overflows is left out, and the next is tried with smaller numbers.
        overflow = self.config.train.dtype == "float16" and not math.isfinite(metrics.grad_norm)
        self._overflows = self._overflows + 1 if overflow else 0
        tolerated = overflow and self._overflows <= OVERFLOWS
        if not (math.isfinite(metrics.loss) and (math.isfinite(metrics.grad_norm) or tolerated)):
            what = "loss" if not math.isfinite(metrics.loss) else "gradient"
            train = self.config.train
            gentler = f"train.learning_rate={train.learning_rate / 4:g}"
            if train.optimizer == "muon" and train.matrix_rate > TrainConfig().matrix_rate:
                gentler = f"train.matrix_rate={TrainConfig().matrix_rate:g}"
            if self.config.train.dtype == "float16":
                gentler = "train.dtype=float32"
            raise TrainingError(
                f"The {what} is not a number at step {number} of {self.run.path}; the checkpoint before it is kept. "
                "Resuming would end the same way.",
                hint=f"a new run: {self.run.train_again(gentler)}",
            )
        self.log.append(
            events.Step(
                step=number,
                epoch=self.plan.epoch(number),
                loss=metrics.loss,
                t2i_accuracy=metrics.t2i_accuracy,
                i2t_accuracy=metrics.i2t_accuracy,
                logit_scale=metrics.logit_scale,
                temperature=math.exp(-metrics.logit_scale),
                lr=lr,
                grad_norm=None if overflow else metrics.grad_norm,
                grad_norms={} if overflow else metrics.part_norms,
                seconds=watch.seconds,
                teacher_loss=metrics.teacher_loss if self.config.train.teacher else None,
                word_loss=metrics.word_loss if self.config.train.word_weight else None,
                logit_bias=metrics.logit_bias if self.step.model.logit_bias is not None else None,
                phrase_loss=metrics.phrase_loss if self.config.train.phrases else None,
            )
        )
        if number == 1 or number % MEMORY_EVERY == 0:
            now, peak = system_memory.memory_bytes(), self.device.peak_memory_bytes()
            self.log.append(events.Memory(step=number, process_bytes=now, peak_bytes=peak))
        if self.sensors.due() or number == self.steps:
            self.log.append(events.Sensors(step=number, **vars(self.sensors.sample())))

    def record_ranks(self, number: int) -> None:
        """Write down now and then how the ranks fare."""
        seconds = time.perf_counter() - self._ranks_seen[0]
        if seconds < RANKS_EVERY and number < self.steps:
            return
        before = self._ranks_seen[1] or [(0.0, 0)] * self.ranks.count
        gained = [
            (waited - old[0], sent - old[1])
            for (waited, sent), old in zip(self.ranks.metrics, before, strict=True)
        ]
        self._ranks_seen = time.perf_counter(), self.ranks.metrics
        shards = self.config.train.shards or self.ranks.count
        self.log.append(
            events.Ranks(
                step=number,
                hosts=list(self.ranks.hosts),
                shards=[
                    len(own_shards(self.ranks, shards, rank)) for rank in range(self.ranks.count)
                ],
                waited=[min(1.0, waited / seconds) for waited, _ in gained],
                bytes_per_second=[sent / seconds for _, sent in gained],
                writer=self.ranks.writer,
            )
        )

    def forget_pending(self) -> None:
        """Drop the metrics of a step that will be done again."""
        self.pending, self._overflows = None, 0

    def check_swap(self, number: int) -> None:
        """Stop between two steps, with all in order, if the system swaps for want of memory."""
        if self.swap is None or not self.device.shares_memory or number == self.steps:
            return
        if grown := self.swap.grown():
            self.step.touched = False
            raise SwapGrew(f"swap has grown by {grown / 1e9:.1f} GB")

    def wait_for_others(self, number: int) -> float:
        """Pause while others need the machine, with all saved; gives back the seconds that took."""
        reason = self.polite_pauses.reason() if self.polite_pauses and number < self.steps else None
        if self.polite_pauses is None or reason is None:
            return 0.0
        began = time.perf_counter()
        self.save()
        self.log.append(events.Paused(step=number, reason=reason))
        while self.polite_pauses.reason() and not self.stop_reason() and not self.run.stop_asked():
            self.sensors.keep_counting()
            time.sleep(PAUSE_CHECK)
        seconds = time.perf_counter() - began
        self.log.append(events.WentOn(step=number, seconds=seconds))
        return seconds

    def evaluation_due(self, number: int) -> bool:
        return (
            number == self.steps
            or number % (self.plan.steps_per_epoch * self.config.train.evaluate_every_epochs) == 0
        )

    def out_of_patience(self, number: int) -> bool:
        """Whether the scores have not risen for so many evaluations that the rest of the run would only overfit.

        Counted from the end of the cheap part: scores rise again when images are seen as they are evaluated.
        """
        train = self.config.train
        patience = train.patience * train.evaluate_every_epochs * self.plan.steps_per_epoch
        since = max(self.progress.best_step, cheap_steps(self.steps, train))
        is_last = number == self.steps
        return (
            patience > 0
            and not is_last
            and self.evaluation_due(number)
            and number - since >= patience
        )

    def end_early(self) -> None:
        """Note why the run takes no more steps."""
        self.ended_early = f"no better score since step {self.progress.best_step:,}"

    def checkpoint_due(self, number: int, seconds: float) -> bool:
        train = self.config.train
        by_epoch = train.checkpoint_every_epochs * self.plan.steps_per_epoch
        by_clock = (
            bool(train.checkpoint_every_seconds) and seconds >= train.checkpoint_every_seconds
        )
        return number == self.steps or by_clock or (by_epoch > 0 and number % by_epoch == 0)

    def evaluate(self, number: int) -> None:
        """Score the held-out pairs, and save the model if it is the best so far."""
        self.record_pending()
        began = time.perf_counter()
        images, texts, owner = self.embed_held_out()
        scores = score_embeddings(images, texts, owner, self.config.train.batch_size)
        merit = self.merit(scores, images)
        best = merit > self.progress.best_score
        if best:
            self._advance(best_score=merit, best_step=number)
            save_model(self.embedder, self.run.model, self.progress)
        seconds = time.perf_counter() - began
        epoch = self.plan.epoch(number)
        self.log.append(
            events.Evaluation(
                step=number, epoch=epoch, split="val", evaluation=scores, seconds=seconds, best=best
            )
        )
        answers = self.probes.answers(self.embedder, images, texts)
        self.log.append(events.Probed(step=number, epoch=epoch, answers=answers))

    def embed_held_out(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Embeddings of the held-out pairs, and each caption's image; several ranks compute them in shares."""
        self.embedder.ranks = self.ranks
        try:
            return self.embedder.encode_pairs(self.data.held_out)
        finally:
            self.embedder.ranks = ALONE

    def merit(self, scores: dict[str, Any], images: np.ndarray) -> float:
        """Return the score that decides which model is kept (`deciding_score`).

        Adds the zero-shot accuracy to the scores where images have classes.
        """
        classes, labels = self.data.classes, self.data.held_out.labels
        if classes and labels is not None:
            prompts = read_templates(self.config.data.prompts)
            class_vectors = class_embeddings(self.embedder.encode_text, classes, prompts)
            scores["zeroshot_top1"] = accuracy(images, class_vectors, labels)
        return deciding_score(scores) or 0.0

    def save(self) -> None:
        """Write a checkpoint of a state whose metrics are known to be numbers."""
        self.record_pending()
        began = time.perf_counter()
        step = self.step
        path = save_checkpoint(
            self.run.checkpoints, step.model, step.optimizer, self.progress, step.others
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - began
        self.log.append(
            events.Checkpoint(step=self.progress.step, path=path.name, bytes=size, seconds=seconds)
        )

    def agree_on_progress(self) -> None:
        """Take over how far the rank that writes has come: it knows the scores, and they decide when a run ends."""
        self.progress = Progress(
            **self.ranks.from_writer(dataclasses.asdict(self.progress), "evaluation")
        )

    def _advance(self, **changes: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **changes)


class Follower(Training):
    """The same on a rank that does not write: it takes every step, and leaves scores and files to the one that does."""

    def save(self) -> None:
        self.record_pending()

    def evaluate(self, number: int) -> None:
        self.record_pending()
        self.embed_held_out()


def score(embedder: Embedder, pairs: Pairs, batch_size: int) -> dict[str, Any]:
    """The scores of a model on some pairs."""
    return score_embeddings(*embedder.encode_pairs(pairs), batch_size)


def score_embeddings(
    images: np.ndarray,
    texts: np.ndarray,
    owner: np.ndarray,
    batch_size: int,
    *,
    among_1000: bool = False,
) -> dict[str, Any]:
    """Score recall both ways, and accuracy in batches of the training's size if there are enough pairs."""
    scores = retrieval(images, texts, owner, among_1000=among_1000)
    return scores | in_batches(images, texts, owner, batch_size)

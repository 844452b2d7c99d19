"""What a run writes down: its folder at the start, and the contents of its events."""

from __future__ import annotations

import importlib.metadata
import math
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from lapclip import __version__
from lapclip.data.dataset import save_seen
from lapclip.data.tokenizers import save_tokenizer
from lapclip.errors import LapclipError
from lapclip.evaluation.hubness import draw_bank, save_bank
from lapclip.machine import facts, system_memory
from lapclip.measure.phases import Laps
from lapclip.model.clip import count_parameters
from lapclip.runs import events
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run
from lapclip.runs.summary import tower_devices
from lapclip.training.checkpoint import save_model
from lapclip.training.objectives.contrastive import LOSSES
from lapclip.training.outcome import TrainOutcome
from lapclip.training.ranks_in_a_run import company, note_job, save_after_loss
from lapclip.training.run_parts import RunParts, saved_settings

if TYPE_CHECKING:
    from lapclip.training.final_scores import FinalScores
    from lapclip.training.step import StepMetrics
    from lapclip.training.trainer import PendingStep, Trainer

MEMORY_EVENT_STEPS = 50
POLITE_NOTE = "polite: low priority; pauses on a low battery, under heat and while swap grows"


def save_start(run: Run, parts: RunParts) -> None:
    """Write what a run needs to be resumed, and which images it sees. The settings come last."""
    save_tokenizer(parts.tokenizer, run.tokenizer)
    save_seen(parts.data.train.identities, run.seen, parts.config.train.start)
    save_bank(draw_bank(parts.data.train.captions), run.questions)
    note_job(run)
    if parts.initial_weights:
        save_model(parts.embedder, run.start)
        parts.initial_weights.read_from(run.start)
    run.write_settings(saved_settings(parts))


def started_event(trainer: Trainer, parts: RunParts, laps: Laps) -> events.Started:
    """Return the event that begins a run."""
    device, train, model = parts.device, parts.config.train, parts.step.model
    held_bytes = system_memory.memory_bytes() if device.is_cpu else device.peak_memory_bytes()
    versions = {
        "lapclip": __version__,
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
    }
    notes = [*parts.notes, *company(trainer.run, trainer.ranks, trainer.config.train.rows)]
    if parts.config.work.polite:
        notes.append(POLITE_NOTE)
    return events.Started(
        notes=notes,
        config=asdict(parts.config),
        reasons=parts.reasons,
        machine=facts.machine_facts(),
        versions=versions,
        commit=facts.source_commit(),
        devices=model.tower_devices(),
        steps=train.steps,
        steps_per_epoch=parts.plan.steps_per_epoch,
        pairs={split: len(pairs) for split, pairs in parts.data.splits.items()},
        captions={split: pairs.repeats() for split, pairs in parts.data.splits.items()},
        parameters=count_parameters(model),
        tuned_seconds=parts.tuned_seconds,
        memory_limit_bytes=held_bytes + device.free_bytes(),
        chance_loss=LOSSES[train.loss].chance(train.batch_size),
        metrics=parts.step.objectives.metrics,
        set_up_seconds=dict(laps.seconds),
        hardware={device.kind: device.label},
    )


def resumed_event(trainer: Trainer, skipped: list[str]) -> events.Resumed:
    """Return the event of a run that continues from a checkpoint.

    `skipped` are damaged checkpoints.
    """
    step, best_step = trainer.progress.step, trainer.progress.best_step
    notes = []
    if best_step > step:
        notes.append(
            f"the best model so far is that of step {best_step:,}, saved after this checkpoint"
        )
    notes += company(trainer.run, trainer.ranks, trainer.config.train.rows)
    return events.Resumed(
        step=step,
        steps=trainer.steps,
        batch_size=trainer.config.train.batch_size,
        checkpoint=f"step-{step:08d}",
        skipped=skipped,
        notes=notes,
        machine=facts.machine_facts(),
    )


def record_step(
    trainer: Trainer, pending: PendingStep, metrics: StepMetrics, *, overflowed: bool
) -> None:
    """Write the events of a step, and now and then those of memory and sensors."""
    number = pending.number
    scalars = {k: v for k, v in metrics.scalars.items() if k not in ("loss", "grad_norm")}
    logit_scale = scalars.pop("logit_scale")
    trainer.log.append(
        events.Step(
            step=number,
            epoch=trainer.plan.epoch(number),
            loss=metrics.loss,
            t2i_accuracy=scalars.pop("t2i_accuracy"),
            i2t_accuracy=scalars.pop("i2t_accuracy"),
            logit_scale=logit_scale,
            temperature=math.exp(-logit_scale),
            lr=pending.lr,
            grad_norm=None if overflowed else metrics.grad_norm,
            grad_norms={} if overflowed else metrics.part_norms,
            seconds=pending.watch.seconds,
            metrics=scalars,
        )
    )
    if number == 1 or number % MEMORY_EVENT_STEPS == 0:
        process_bytes = system_memory.memory_bytes()
        peak_bytes = trainer.device.peak_memory_bytes()
        trainer.log.append(
            events.Memory(step=number, process_bytes=process_bytes, peak_bytes=peak_bytes)
        )
    if trainer.sensors.due() or number == trainer.steps:
        trainer.log.append(events.Sensors(step=number, **vars(trainer.sensors.sample())))


def record_end(trainer: Trainer, scores: FinalScores) -> None:
    """Write the event that ends a run."""
    trainer.log.append(
        events.Finished(
            step=trainer.progress.step,
            training_seconds=trainer.progress.training_seconds,
            pairs_per_second=pairs_per_second(trainer),
            peak_memory_bytes=trainer.device.peak_memory_bytes(),
            evaluation=scores.evaluation,
            start_evaluation=scores.start_evaluation,
            short_questions=scores.short_questions,
            places=tower_devices(read_events(trainer.run.events)),
            best_step=trainer.progress.best_step,
            early=trainer.ended_early,
        )
    )


def record_failure(trainer: Trainer, error: Exception) -> None:
    """Write the event of a run that failed."""
    text = str(error) or type(error).__name__
    if trainer.ranks.count > 1:
        text = save_after_loss(trainer, error)
    with suppress(LapclipError):
        trainer.log.append(events.Failed(step=trainer.progress.step, error=text))


def outcome_of(
    trainer: Trainer, scores: FinalScores | None, seconds: float, signal: int | None
) -> TrainOutcome:
    """Return the outcome of a run. `scores` are None if it was stopped."""
    return TrainOutcome(
        run=str(trainer.run.path),
        state="stopped" if scores is None else "finished",
        seconds=seconds,
        training_seconds=trainer.progress.training_seconds,
        steps=trainer.progress.step,
        pairs_per_second=pairs_per_second(trainer),
        peak_memory_bytes=trainer.device.peak_memory_bytes(),
        devices=trainer.step.model.tower_devices(),
        data=trainer.config.data.source,
        best_step=trainer.progress.best_step,
        early=trainer.ended_early,
        places=tower_devices(read_events(trainer.run.events)),
        evaluation=scores.evaluation if scores else None,
        start_evaluation=scores.start_evaluation if scores else None,
        short_questions=scores.short_questions if scores else None,
        signal=signal,
    )


def pairs_per_second(trainer: Trainer) -> float:
    """Return the mean speed of the run so far."""
    progress = trainer.progress
    if not progress.training_seconds:
        return 0.0
    return progress.step * trainer.config.train.batch_size / progress.training_seconds

"""Scores of the held-out pairs between epochs. They choose the model that a run keeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from lapclip.evaluation.zeroshot import accuracy
from lapclip.prompts import class_embeddings, read_templates
from lapclip.runs import events
from lapclip.runs.trend import deciding_score
from lapclip.training.checkpoint import save_model
from lapclip.training.final_scores import score_embeddings
from lapclip.training.ranks_in_a_run import agree_on_progress, encoding_together

if TYPE_CHECKING:
    from lapclip.training.trainer import Trainer


def evaluate_held_out(trainer: Trainer, number: int) -> None:
    """Score the held-out pairs after a step, and save the model if it is the best so far."""
    began, epoch = time.perf_counter(), trainer.plan.epoch(number)
    with encoding_together(trainer.embedder, trainer.ranks):
        images, texts, owner = trainer.embedder.encode_pairs(trainer.data.held_out)
    scores = score_embeddings(images, texts, owner, trainer.config.train.batch_size)
    merit = merit_of(scores, images, trainer)
    is_best = merit > trainer.progress.best_score
    if is_best:
        trainer.advance(best_score=merit, best_step=number)
    agree_on_progress(trainer)
    is_best = trainer.ranks.broadcast_json(is_best)
    if is_best:
        save_model(trainer.embedder, trainer.run.model, trainer.progress, trainer.ranks)
    trainer.log.append(
        events.Evaluation(
            step=number,
            epoch=epoch,
            split="val",
            evaluation=scores,
            seconds=time.perf_counter() - began,
            best=is_best,
        )
    )
    answers = trainer.probes.answers(trainer.embedder, images, texts)
    trainer.log.append(events.Probed(step=number, epoch=epoch, answers=answers))


def merit_of(scores: dict[str, Any], images: np.ndarray, trainer: Trainer) -> float:
    """Return the score that decides which model is kept.

    Adds the zero-shot accuracy to the scores if images have classes.
    """
    classes, labels = trainer.data.classes, trainer.data.held_out.labels
    if classes and labels is not None:
        prompts = read_templates(trainer.config.data.prompts)
        class_vectors = class_embeddings(trainer.embedder.encode_text, classes, prompts)
        scores["zeroshot_top1"] = accuracy(images, class_vectors, labels)
    return deciding_score(scores) or 0.0

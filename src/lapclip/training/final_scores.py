"""The scores at the end of a run: of its best model, and of the trained model it started from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lapclip.data.dataset import DataSet, Pairs
from lapclip.embedder import Embedder, load_torch
from lapclip.evaluation.calibration import calibrate, save_calibration
from lapclip.evaluation.hubness import draw_bank, read_bank
from lapclip.evaluation.retrieval import in_batches, retrieval
from lapclip.evaluation.short_questions import (
    ShortQuestions,
    evaluate_short_questions,
    short_questions,
)
from lapclip.training.frozen_features import with_features

if TYPE_CHECKING:
    from lapclip.training.run_parts import RunParts
    from lapclip.training.trainer import Trainer

# The end of a run calibrates search from so many images and steps on; for other runs `lapclip eval`
# does. Below that it would take longer than the training.
MIN_CALIBRATION_IMAGES = 100
MIN_CALIBRATION_STEPS = 100

Vectors = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Embeddings of images and of captions, and each caption's image."""


@dataclass(frozen=True)
class FinalScores:
    """Scores on the split that chose nothing."""

    evaluation: dict[str, Any]
    """Scores of the best model."""
    start_evaluation: dict[str, Any] | None = None
    """Scores of the trained model that the run started from. None if it started with new heads."""
    short_questions: dict[str, Any] | None = None
    """Scores of words and phrases as queries. None if there are too few."""


@dataclass(frozen=True)
class FinalVectors:
    """The best model and all embeddings that the final scores need."""

    best: Embedder
    best_vectors: Vectors
    questions: ShortQuestions | None
    question_vectors: np.ndarray | None
    start_vectors: Vectors | None
    """Embeddings of a trained start for the same pairs. None if the run started with new heads."""


def score(embedder: Embedder, pairs: Pairs, batch_size: int) -> dict[str, Any]:
    """Return the scores of a model on some pairs."""
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


def embed_final(trainer: Trainer) -> FinalVectors:
    """Embed the final split with the best model, and with a trained start as well."""
    pairs = trainer.data.final[1]
    best = _load(trainer, trainer.run.path)
    questions = question_vectors = start_vectors = None
    if not trainer.data.classes:  # captions that are names of classes have no phrases
        questions = short_questions(pairs.captions)
    best_vectors = best.encode_pairs(pairs)
    if questions:
        question_vectors = best.encode_text(questions.texts)
    if trainer.config.train.start:
        start = _load(trainer, trainer.run.start)
        start = with_features(start, trainer.features, trainer.step)
        start_vectors = start.encode_pairs(pairs)
    return FinalVectors(best, best_vectors, questions, question_vectors, start_vectors)


def compute_final_scores(trainer: Trainer, vectors: FinalVectors) -> FinalScores:
    """Score the embeddings of the final split."""
    start_evaluation = queries = None
    evaluation = _scores(trainer, vectors.best_vectors)
    if vectors.questions and vectors.question_vectors is not None:
        images = vectors.best_vectors[0]
        queries = evaluate_short_questions(images, vectors.question_vectors, vectors.questions)
    if vectors.start_vectors:
        start_evaluation = _scores(trainer, vectors.start_vectors)
    return FinalScores(evaluation, start_evaluation, queries)


def calibrate_search(trainer: Trainer, vectors: FinalVectors) -> None:
    """Measure the correction for hubness that search uses, on the pairs that chose the model.

    The pairs of another final split choose nothing. Small runs are not calibrated here.
    """
    if not will_calibrate(trainer.data, trainer.progress.step):
        return
    embedded = vectors.best_vectors
    if trainer.data.final[0] != "val":
        embedded = vectors.best.encode_pairs(trainer.data.held_out)
    if not all(np.isfinite(part).all() for part in embedded[:2]):
        return
    bank = read_bank(trainer.run.questions) or draw_bank(trainer.data.train.captions)
    calibration, _ = calibrate(vectors.best, bank, *embedded)
    save_calibration(calibration, trainer.run.calibration)


def will_calibrate(data: DataSet, steps: int) -> bool:
    """Return whether the end of a run of so many steps calibrates search."""
    is_large = len(data.held_out) >= MIN_CALIBRATION_IMAGES and steps >= MIN_CALIBRATION_STEPS
    return is_large and not data.classes


def count_final_passes(parts: RunParts) -> int:
    """Return how often the end of a run embeds as many pairs as the final split has, at most."""
    passes = 1
    if parts.config.train.start:
        passes += 1
    if parts.data.final[0] != "val" and will_calibrate(parts.data, MIN_CALIBRATION_STEPS):
        passes += 1
    return passes


def _load(trainer: Trainer, folder: Path) -> Embedder:
    embedder = load_torch(folder, trainer.device.kind)
    embedder.batch = trainer.embedder.batch
    return embedder


def _scores(trainer: Trainer, vectors: Vectors) -> dict[str, Any]:
    # Images of a class share a caption, so R@1 among 1,000 stays low for a perfect model.
    among_1000 = not trainer.data.classes
    scores = score_embeddings(*vectors, trainer.config.train.batch_size, among_1000=among_1000)
    return {"split": trainer.data.final[0], **scores}

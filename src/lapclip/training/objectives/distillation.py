"""Distillation: embeddings come close to those of a teacher (`train.teacher`,
`train.teacher_weight`).

Shapes: B pairs of a batch, R of them this process's own, E embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, DrawnRows, Slicing
from lapclip.training.objectives.base import LossRows, Objective, Term


@dataclass(frozen=True)
class TeacherVectors:
    """Unit-length vectors of the training pairs from a teacher."""

    images: np.ndarray
    captions: np.ndarray
    """One for each caption, ordered by image."""


class Distillation(Objective):
    """The mean distance of images and captions from the teacher's. It needs no negatives."""

    extras: ClassVar = {"teacher_image": Slicing.ROWS, "teacher_text": Slicing.ROWS}
    metrics: ClassVar = {
        "teacher_loss": "How far the embeddings are from the teacher's.",
        "contrastive_loss": "The loss without the teacher's share.",
    }
    is_recorded = True
    is_share = True

    def __init__(self, config: TrainConfig, teacher: TeacherVectors | None = None) -> None:
        super().__init__(config)
        self.weight = config.teacher_weight
        self._teacher = teacher

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        if self._teacher is None:
            return {}
        return {
            "teacher_image": self._teacher.images[drawn.rows],
            "teacher_text": self._teacher.captions[drawn.captions],
        }

    def term(self, rows: LossRows) -> Term:
        share = len(rows.own["image"]) / rows.size
        image = similarity(rows.own["image"], rows.extras["teacher_image"], rows.size)
        text = similarity(rows.own["text"], rows.extras["teacher_text"], rows.size)
        loss = 2 * share - image - text
        return Term(loss, {"teacher_loss": loss.detach()})


def similarity(left_RE: Tensor, right_RE: Tensor, size: int) -> Tensor:
    """Return the sum of cosines of rows of unit length, as a share of the whole batch."""
    return (left_RE * right_RE).sum(1).sum() / size

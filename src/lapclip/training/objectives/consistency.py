"""Consistency: two crops of an image have embeddings that are close (`train.consistency`).

Shapes: B pairs of a batch, R of them this process's own, E embedding.
"""

from __future__ import annotations

from typing import ClassVar

from lapclip.config import ALL, KEEP, TrainConfig
from lapclip.errors import ConfigError
from lapclip.training.objectives.base import LossRows, Objective, Pass, Term

SECOND_CROP = Pass("second_crop", "image")


class Consistency(Objective):
    """The mean distance of the embeddings of two crops."""

    passes = (SECOND_CROP,)
    metrics: ClassVar = {
        "consistency_loss": "How far the embeddings of two crops of an image are apart."
    }

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.weight = config.consistency

    def check(self) -> None:
        config = self.config
        if config.crop == 1 and not config.flip:
            raise ConfigError(
                "train.consistency needs crops or flips, and train.crop is 1 and train.flip 0.",
                hint="--set train.crop=0.35",
            )
        if config.image_blocks != ALL and config.views and config.features == KEEP:
            raise ConfigError(
                "train.consistency needs new crops at each step; frozen image features have none.",
                hint="--set train.features=never",
            )

    def term(self, rows: LossRows) -> Term:
        crop_RE, second_RE = rows.own["image"], rows.own[SECOND_CROP.name]
        loss = (1 - (crop_RE * second_RE).sum(1)).sum() / rows.size
        return Term(loss, {"consistency_loss": loss.detach()})

"""Consistency: two crops of an image are close, crops of others are not (`train.consistency`).

Shapes: B pairs of a batch, R of them this process's own.
"""

from __future__ import annotations

from typing import ClassVar

from lapclip.config import ALL, KEEP, TrainConfig
from lapclip.errors import ConfigError
from lapclip.training.objectives.base import LossRows, Objective, Pass, Term
from lapclip.training.objectives.contrastive import Similarity, compare_with_images

SECOND_CROP = Pass("second_crop", "image")
SCALE = 10.0  # factor of similarities: a temperature of 0.1, as in SLIP (arXiv 2112.12750)


class Consistency(Objective):
    """The softmax loss between the crops. Pairs that share an image or a caption are positives."""

    passes = (SECOND_CROP,)
    metrics: ClassVar = {
        "consistency_loss": "How badly crops of an image are told from crops of others."
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
        crop, similarity = SECOND_CROP.name, Similarity(SCALE)
        loss = compare_with_images(rows, crop, "positives_BB", "softmax", similarity).loss
        return Term(loss, {"consistency_loss": loss.detach()})

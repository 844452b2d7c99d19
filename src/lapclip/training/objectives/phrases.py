"""Phrases: images are close to a word or a few of their captions (`train.phrases`), so that short
queries work.

Shapes: B pairs of a batch, R of them this process's own, K phrases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, DrawnRows, Slicing, equal_pairs
from lapclip.data.phrases import Phrases, cut_phrases
from lapclip.data.ragged import Ragged
from lapclip.seeding import generator
from lapclip.training.objectives.base import LossRows, Objective, Pass, Term
from lapclip.training.objectives.contrastive import Similarity, compare_with_images, model_scale

MIN_IMAGES = 2  # with a phrase; of one image alone its captions say more
RARITY = 0.5  # a phrase of an image is drawn in proportion to (images that have it) ** -RARITY
PHRASE = Pass("phrase", "text")


class PhraseObjective(Objective):
    """The contrastive loss of images and phrases, beside that of images and captions."""

    extras: ClassVar = {
        "phrase_tokens_BL": Slicing.ROWS,
        "phrase_positives_BB": Slicing.ROWS_AND_COLUMNS,
        "phrase_features": Slicing.OWN_ROWS,
    }
    passes = (PHRASE,)
    metrics: ClassVar = {
        "phrase_loss": "The contrastive loss of images and phrases, which the loss leaves out."
    }
    is_share = True

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.weight = config.phrases
        self._table: PhraseTable | None = None

    def is_in(self, extras: Mapping[str, object]) -> bool:
        return PHRASE.source in extras

    def texts(self, plan: BatchPlan) -> dict[str, Sequence[np.ndarray]]:
        return {PHRASE.name: self._table_of(plan).tokens}

    def why_unused(self, plan: BatchPlan) -> str | None:
        if len(self._table_of(plan).tokens):
            return None
        return "not used: no word is in the captions of two images"

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        """Draw a phrase for each image. An image without phrases takes another's, which is not true
        of it."""
        table = self._table_of(plan)
        if not len(table.tokens):
            return {}
        numbers = table.draw(drawn.rows, self.config.seed, drawn.step)
        if numbers is None:
            return {}
        has_BB = table.phrases.in_images(numbers, drawn.rows)
        groups = plan.groups(drawn.rows)
        if groups:
            has_BB = equal_pairs(*groups).astype(np.float32) @ has_BB > 0
        tokens_BL, _ = plan.padded(table.tokens, numbers)
        arrays = {PHRASE.source: tokens_BL, "phrase_positives_BB": has_BB}
        features = plan.frozen_texts(PHRASE.name, numbers[drawn.own], tokens_BL.shape[1])
        if features is not None:
            arrays[PHRASE.features] = features
        return arrays

    def term(self, rows: LossRows) -> Term:
        similarity = Similarity(*model_scale(rows.model), self.config.label_smoothing)
        positives = "phrase_positives_BB"
        loss_name = self.config.loss
        loss = compare_with_images(rows, PHRASE.name, positives, loss_name, similarity).loss
        return Term(loss, {"phrase_loss": loss.detach()})

    def _table_of(self, plan: BatchPlan) -> PhraseTable:
        if self._table is None:
            self._table = PhraseTable.of(plan)
        return self._table


@dataclass(frozen=True)
class PhraseTable:
    """The phrases of all captions."""

    phrases: Phrases
    tokens: Ragged
    """Tokens of each phrase."""
    likelihood: np.ndarray
    """How likely each phrase of each image is to be drawn, summed up over all images from 0."""

    @classmethod
    def of(cls, plan: BatchPlan) -> PhraseTable:
        phrases = cut_phrases(plan.pairs.captions, MIN_IMAGES)
        tokens = []
        if len(phrases):
            tokens = plan.tokenizer.encode_all(phrases.texts, plan.context)
        weights = phrases.images_K[phrases.numbers] ** -RARITY
        return cls(phrases, Ragged.of(tokens), np.concatenate([[0.0], np.cumsum(weights)]))

    def draw(self, rows: np.ndarray, seed: int, step: int) -> np.ndarray | None:
        """Return the number of a phrase for each of these images. None if none of them has a
        phrase."""
        first_B, last_B = self.phrases.first_N[rows], self.phrases.first_N[rows + 1]
        has_phrases_B = last_B > first_B
        if not has_phrases_B.any():
            return None
        draws_B = generator(seed, "phrases", step).random(len(rows))
        low_B, high_B = self.likelihood[first_B], self.likelihood[last_B]
        drawn_B = low_B + draws_B * (high_B - low_B)
        at_B = np.searchsorted(self.likelihood, drawn_B, side="right") - 1
        at_B = np.clip(at_B, first_B, np.maximum(last_B - 1, first_B))  # sums are rounded
        lenders = np.flatnonzero(has_phrases_B)
        numbers_B = np.arange(len(rows))
        lender_B = np.where(has_phrases_B, numbers_B, lenders[numbers_B % len(lenders)])
        return self.phrases.numbers[at_B[lender_B]]

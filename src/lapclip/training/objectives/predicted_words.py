"""Predicted words: from each embedding, the tokens of all captions of its image
(`train.word_weight`).

Captions that say the same in other words come together.

Shapes: B pairs of a batch, R of them this process's own, E embedding, V vocabulary, T tokens of all
captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, DrawnRows, Slicing
from lapclip.data.ragged import Ragged
from lapclip.model.clip import CLIP
from lapclip.seeding import derived_seed
from lapclip.training.objectives.base import LossRows, Objective, Term

MIN_IMAGES = 5  # with a token, before it is predicted
WORD_SCALE = 16.0  # factor of products with word vectors, which start at length one
WORDS = "words"  # parameter of the model while it trains


class PredictedWords(Objective):
    """Cross-entropy over the vocabulary, for images and for captions."""

    extras: ClassVar = {"words_BV": Slicing.ROWS}
    metrics: ClassVar = {
        "word_loss": "How badly the words of the captions are predicted from the embeddings."
    }

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.weight = config.word_weight
        self._table: WordTable | None = None

    def start(self, model: CLIP, *, is_new: bool) -> None:
        """Give the model a vector for each token, of about length one and any direction."""
        shape = model.shape
        draw = torch.Generator().manual_seed(derived_seed(self.config.seed, "words"))
        vectors_VE = torch.randn((shape.vocabulary, shape.embedding), generator=draw)
        model.add_training_parameter(WORDS, vectors_VE * shape.embedding**-0.5)

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        if self._table is None:
            self._table = WordTable.of(plan)
        return {"words_BV": self._table.shares(drawn.rows)}

    def term(self, rows: LossRows) -> Term:
        words_VE = rows.model.get_parameter(WORDS)
        targets_RV = rows.extras["words_BV"]
        image = word_loss(rows.own["image"], words_VE, targets_RV, rows.size)
        text = word_loss(rows.own["text"], words_VE, targets_RV, rows.size)
        loss = image + text
        return Term(loss, {"word_loss": loss.detach()})


def word_loss(embeddings_RE: Tensor, words_VE: Tensor, targets_RV: Tensor, size: int) -> Tensor:
    """Return the cross-entropy of the predicted tokens, as a share of a batch of this size.

    Rows of `targets_RV` add up to one.
    """
    logits_RV = WORD_SCALE * embeddings_RE @ words_VE.T
    return F.cross_entropy(logits_RV, targets_RV, reduction="sum") / size


@dataclass(frozen=True)
class WordTable:
    """The tokens that the captions of each image have."""

    tokens: Ragged
    """Of each image, each token once."""
    weights_V: np.ndarray
    """Weight of each token: higher the fewer images have it, 0 if all or fewer than `MIN_IMAGES`
    have it."""

    @classmethod
    def of(cls, plan: BatchPlan) -> WordTable:
        captions, first_N = plan.encoded.tokens, plan.encoded.first_N
        size, images = plan.tokenizer.vocabulary, len(plan.pairs)
        image_of_caption = np.repeat(np.arange(images), np.diff(first_N))
        image_T = np.repeat(image_of_caption, captions.lengths(np.arange(len(captions))))
        is_word_T = ~np.isin(captions.values, (plan.tokenizer.start, plan.tokenizer.end))
        # An image and a token are one number, so that `unique` finds each token of an image once.
        pairs = np.unique((image_T * size + captions.values)[is_word_T])
        image_of_token, tokens = np.divmod(pairs, size)
        counts_V = np.bincount(tokens, minlength=size)
        rarity_V = np.sqrt(np.log(images / np.maximum(counts_V, 1)))
        weights_V = rarity_V * (counts_V >= MIN_IMAGES)
        first = np.searchsorted(image_of_token, np.arange(images + 1))
        return cls(Ragged(tokens, first), weights_V.astype(np.float32))

    def shares(self, rows: np.ndarray) -> np.ndarray:
        """Return the weights of the tokens of some images, each row adding up to one. (B, V)"""
        tokens = self.tokens.joined(rows)
        shares_BV = np.zeros((len(rows), len(self.weights_V)), dtype=np.float32)
        row_of_token = np.repeat(np.arange(len(rows)), self.tokens.lengths(rows))
        shares_BV[row_of_token, tokens] = self.weights_V[tokens]
        shares_BV /= np.maximum(shares_BV.sum(1, keepdims=True), 1e-6)
        return shares_BV

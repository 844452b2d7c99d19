"""Predicted words: each embedding predicts the tokens of all captions of its image.

Brings captions together that say the same in other words. The setting is `train.word_weight`.

Shapes: B pairs of a batch, R of them this process's own, E embedding, V vocabulary, N images of the
split, T tokens of all captions.
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

MIN_IMAGES = 5  # a token of fewer images is not predicted
WORD_SCALE = 16.0  # factor on products with word vectors, which start with length one
WORDS = "words"  # name of the word vectors among the parameters of the model


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
        """Add a random vector of about length one for each token to the model."""
        shape = model.shape
        draw = torch.Generator().manual_seed(derived_seed(self.config.seed, "words"))
        vectors_VE = torch.randn((shape.vocabulary, shape.embedding), generator=draw)
        model.add_training_parameter(WORDS, vectors_VE * shape.embedding**-0.5)

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        if self._table is None:
            self._table = WordTable.of(plan)
        return {"words_BV": self._table.targets(drawn.rows)}

    def term(self, rows: LossRows) -> Term:
        words_VE = rows.model.get_parameter(WORDS)
        targets_RV = rows.extras["words_BV"]
        image = word_loss(rows.own["image"], words_VE, targets_RV, rows.size)
        text = word_loss(rows.own["text"], words_VE, targets_RV, rows.size)
        loss = image + text
        return Term(loss, {"word_loss": loss.detach()})


def word_loss(embeddings_RE: Tensor, words_VE: Tensor, targets_RV: Tensor, size: int) -> Tensor:
    """Return the cross-entropy of predicted tokens, summed over rows and divided by the batch size.

    Each row of `targets_RV` has probabilities that add up to one.
    """
    logits_RV = WORD_SCALE * embeddings_RE @ words_VE.T
    return F.cross_entropy(logits_RV, targets_RV, reduction="sum") / size


@dataclass(frozen=True)
class WordTable:
    """The distinct tokens in the captions of each image, and their weights."""

    tokens: Ragged
    """Distinct tokens of each image, without those that start and end a caption."""
    weights_V: np.ndarray
    """Weight of each token, as `token_weights` returns it."""

    @classmethod
    def of(cls, plan: BatchPlan) -> WordTable:
        """Collect the tokens of all training captions."""
        tokens = distinct_tokens(plan)
        weights_V = token_weights(tokens.values, len(plan.pairs), plan.tokenizer.vocabulary)
        return cls(tokens, weights_V)

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """Return target probabilities of all tokens for images, (B, V)."""
        targets_BV = np.zeros((len(rows), len(self.weights_V)), dtype=np.float32)
        tokens = self.tokens.joined(rows)
        row_of_token = np.repeat(np.arange(len(rows)), self.tokens.lengths(rows))
        targets_BV[row_of_token, tokens] = self.weights_V[tokens]
        targets_BV /= np.maximum(targets_BV.sum(1, keepdims=True), 1e-6)
        return targets_BV


def distinct_tokens(plan: BatchPlan) -> Ragged:
    """Return the distinct tokens in all captions of each image."""
    captions, vocabulary = plan.encoded.tokens, plan.tokenizer.vocabulary
    images = np.arange(len(plan.pairs))
    image_of_caption = np.repeat(images, np.diff(plan.encoded.first_N))
    image_T = np.repeat(image_of_caption, captions.lengths(np.arange(len(captions))))
    is_word_T = ~np.isin(captions.values, (plan.tokenizer.start, plan.tokenizer.end))
    # `unique` over pairs of image and token, each pair encoded as one number.
    pairs = np.unique((image_T * vocabulary + captions.values)[is_word_T])
    image_of_token, tokens = np.divmod(pairs, vocabulary)
    first_N = np.searchsorted(image_of_token, np.arange(len(images) + 1))
    return Ragged(tokens, first_N)


def token_weights(tokens: np.ndarray, images: int, vocabulary: int) -> np.ndarray:
    """Return the weight of each token in the vocabulary: the fewer images have it, the higher.

    Tokens of all images and of fewer than MIN_IMAGES get 0. `tokens` has each token once an image.
    """
    counts_V = np.bincount(tokens, minlength=vocabulary)
    rarity_V = np.sqrt(np.log(images / np.maximum(counts_V, 1)))
    return (rarity_V * (counts_V >= MIN_IMAGES)).astype(np.float32)

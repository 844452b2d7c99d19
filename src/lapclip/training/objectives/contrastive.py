"""The contrastive losses of images and texts: CLIP's softmax and SigLIP's sigmoid.

Shapes: B pairs of a batch, R rows of it, E embedding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.model.clip import CLIP
from lapclip.training.loss_rows import ContrastiveRows, contrastive_rows
from lapclip.training.objectives.base import LossRows, Objective, Term, TruePairs


class ContrastiveLoss(ABC):
    """A loss of the similarities of all images of a batch with all its texts."""

    initial_scale: ClassVar[float]
    """Learned factor of similarities at the start."""

    @abstractmethod
    def initial_bias(self, batch_size: int) -> float | None:
        """Return the learned offset of scaled similarities at the start. None without a bias."""

    @property
    def has_bias(self) -> bool:
        """Whether a bias is learned beside the scale."""
        return self.initial_bias(2) is not None

    @abstractmethod
    def chance(self, batch_size: int) -> float:
        """Return the loss of guessing, for pairs with one true partner each."""

    @abstractmethod
    def of_rows(
        self,
        by_image_RB: Tensor,
        by_text_RB: Tensor,
        pairs: TruePairs,
        smoothing: float = 0.0,
    ) -> Tensor:
        """Return what some rows add to the loss of the batch, from the logits of their images and
        texts.

        `smoothing` is the share of the target that all pairs have, if the loss has a use for it.
        """

    def __call__(self, logits_BB: Tensor, positives_BB: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of a whole batch. Rows are images, columns texts."""
        pairs = TruePairs(positives_BB, positives_BB.T)
        return self.of_rows(logits_BB, logits_BB.T, pairs, smoothing)


class SoftmaxLoss(ContrastiveLoss):
    """CLIP's loss: each image chooses among all texts, and each text among all images.

    A row aims at all of its positives equally; a row without positives adds nothing.
    """

    initial_scale = 1 / 0.07

    def initial_bias(self, batch_size: int) -> None:
        return None

    def chance(self, batch_size: int) -> float:
        return math.log(batch_size)

    def of_rows(
        self,
        by_image_RB: Tensor,
        by_text_RB: Tensor,
        pairs: TruePairs,
        smoothing: float = 0.0,
    ) -> Tensor:
        image_loss = self._choose(by_image_RB, pairs.by_image_RB, smoothing)
        text_loss = self._choose(by_text_RB, pairs.by_text_RB, smoothing)
        return (image_loss + text_loss) / 2

    def _choose(self, logits_RB: Tensor, positives_RB: Tensor, smoothing: float) -> Tensor:
        targets_RB = soft_targets(positives_RB.to(logits_RB.dtype), smoothing)
        return F.cross_entropy(logits_RB, targets_RB, reduction="sum") / logits_RB.shape[1]


def soft_targets(positives_RB: Tensor, smoothing: float) -> Tensor:
    """Return target probabilities: uniform over the positives of a row, mixed with uniform over the
    batch.

    A row without positives is all zeros. `F.cross_entropy(label_smoothing=...)` would smooth such
    rows as well.
    """
    count_R1 = positives_RB.sum(1, keepdim=True)
    targets_RB = positives_RB / count_R1.clamp(min=1)
    if not smoothing:
        return targets_RB
    has_positives_R1 = (count_R1 > 0).to(positives_RB.dtype)
    return (1 - smoothing) * targets_RB + smoothing / positives_RB.shape[1] * has_positives_R1


class SigmoidLoss(ContrastiveLoss):
    """SigLIP's loss (Zhai et al. 2023, arXiv 2303.15343): each pair is judged true or false by
    itself.

    Summed over all pairs and divided by the batch, as published. Several positives in a row are
    several true pairs.
    """

    initial_scale = 10.0

    def initial_bias(self, batch_size: int) -> float:
        # A pair is true with probability 1 / B before anything is learned. The published -10 says
        # the same of batches near 22,000, and costs a small run its first steps (open_clip issue
        # 650).
        return -math.log(max(batch_size - 1, 1))

    def chance(self, batch_size: int) -> float:
        if batch_size == 1:
            return 0.0
        share = 1 / batch_size
        return -math.log(share) - (batch_size - 1) * math.log1p(-share)

    def of_rows(
        self,
        by_image_RB: Tensor,
        by_text_RB: Tensor,
        pairs: TruePairs,
        smoothing: float = 0.0,
    ) -> Tensor:
        # Every pair is in the row of its image.
        signed_RB = torch.where(pairs.by_image_RB, -by_image_RB, by_image_RB)
        return F.softplus(signed_RB).sum() / by_image_RB.shape[1]


LOSSES: dict[str, ContrastiveLoss] = {"softmax": SoftmaxLoss(), "sigmoid": SigmoidLoss()}


class Contrastive(Objective):
    """Images and captions of a pair are close, others are not (`train.loss`,
    `train.label_smoothing`)."""

    metrics: ClassVar = {
        "logit_bias": "The learned offset of similarities: how rare true pairs are."
    }
    is_recorded = True

    def term(self, rows: LossRows) -> Term:
        similarity = Similarity(*model_scale(rows.model), self.config.label_smoothing)
        result = compare_with_images(rows, "text", "positives_BB", self.config.loss, similarity)
        metrics = {
            "t2i_accuracy": result.t2i_accuracy,
            "i2t_accuracy": result.i2t_accuracy,
            "logit_scale": rows.model.logit_scale.detach(),
        }
        if rows.model.logit_bias is not None:
            metrics["logit_bias"] = rows.model.logit_bias.detach()
        return Term(result.loss, metrics)

    def start(self, model: CLIP, *, is_new: bool) -> None:
        """Set the scale and the bias that the loss starts with.

        A model that was trained with the same loss keeps its own. One of another loss starts again,
        because a scale of 100, which softmax ends with, leaves a sigmoid no room.
        """
        loss = LOSSES[self.config.loss]
        bias = loss.initial_bias(self.config.batch_size)
        has_same_loss = (bias is None) == (model.logit_bias is None)
        if is_new or not has_same_loss:
            model.start_logits(loss.initial_scale, bias)


def model_scale(model: CLIP) -> tuple[Tensor, Tensor | None]:
    """Return the learned factor and offset of similarities."""
    return model.logit_scale.exp(), model.logit_bias


@dataclass(frozen=True)
class Similarity:
    """How products of embeddings become logits, and how sure of them the targets are."""

    scale: Tensor | float
    bias: Tensor | None = None
    smoothing: float = 0.0
    """Share of the target that all pairs of a batch have."""


def compare_with_images(
    rows: LossRows, other: str, positives: str, loss_name: str, similarity: Similarity
) -> ContrastiveRows:
    """Return the contrastive loss of images and another pass, and the accuracy in both directions.

    `positives` names the pairs that belong together. A single process has all logits in memory.
    One of several ranks computes those of its own rows, block by block.
    """
    scale, bias, smoothing = similarity.scale, similarity.bias, similarity.smoothing
    if rows.columns is not None:
        scale = torch.as_tensor(scale, device=rows.own["image"].device)
        return contrastive_rows(rows, other, positives, loss_name, scale, bias, smoothing)
    pairs = rows.pairs[positives]
    by_image_RB, by_other_RB = logits_of(rows, other, scale, bias)
    return ContrastiveRows(
        loss=LOSSES[loss_name].of_rows(by_image_RB, by_other_RB, pairs, smoothing),
        t2i_accuracy=row_accuracy(by_other_RB, pairs.by_text_RB),
        i2t_accuracy=row_accuracy(by_image_RB, pairs.by_image_RB),
    )


def logits_of(
    rows: LossRows, other: str, scale: Tensor | float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return scaled similarities with another pass: own images with all of its rows, and its own
    rows with all images.

    For a whole batch the second is the transpose of the first, so there is one product.
    """
    by_image_RB = scale * rows.own["image"] @ rows.gathered[other].T
    if bias is not None:
        by_image_RB = by_image_RB + bias
    if rows.is_whole:
        return by_image_RB, by_image_RB.T
    by_other_RB = scale * rows.own[other] @ rows.gathered["image"].T
    if bias is not None:
        by_other_RB = by_other_RB + bias
    return by_image_RB, by_other_RB


@torch.no_grad()
def row_accuracy(logits_RB: Tensor, positives_RB: Tensor) -> Tensor:
    """Return how many rows are closest to a true partner, as a share of the whole batch."""
    best_R1 = logits_RB.argmax(1, keepdim=True)
    return positives_RB.gather(1, best_R1).float().sum() / logits_RB.shape[1]


def contrastive_loss(
    image_BE: Tensor,
    text_BE: Tensor,
    scale: Tensor,
    positives_BB: Tensor,
    bias: Tensor | None = None,
    loss: ContrastiveLoss = LOSSES["softmax"],
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the contrastive loss of unit-length embeddings, and its logits."""
    logits_BB = scale * image_BE @ text_BE.T
    if bias is not None:
        logits_BB = logits_BB + bias
    return loss(logits_BB, positives_BB, smoothing), logits_BB


def batch_accuracy(logits_BB: Tensor, positives_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of captions whose best image is a true one, and of images whose best caption
    is."""
    t2i = row_accuracy(logits_BB.T, positives_BB.T)
    return t2i, row_accuracy(logits_BB, positives_BB)

"""The losses: tensors in, scalar out. Shapes: B batch, E embedding.

A contrastive loss is a class with its name, what its learnt scale and bias start with, and the loss of guessing. It
registers itself under its name, which `train.loss` takes. Everything else asks the class: the step computes it, the
set-up of a run gives the model its scale and bias, and the run records the loss of guessing for the doctor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES: dict[str, ContrastiveLoss] = {}
"""The contrastive losses by name."""


class ContrastiveLoss(ABC):
    """A loss of the similarities of all images of a batch with all its captions."""

    name: ClassVar[str]
    initial_scale: ClassVar[float]
    """What similarities are multiplied by at the start; learnt."""

    def __init_subclass__(cls) -> None:
        LOSSES[cls.name] = cls()

    @abstractmethod
    def initial_bias(self, batch_size: int) -> float | None:
        """What is added to scaled similarities at the start; learnt. None for a loss without a bias."""

    @property
    def has_bias(self) -> bool:
        """Whether it learns a bias beside the scale."""
        return self.initial_bias(2) is not None

    @abstractmethod
    def chance(self, batch_size: int) -> float:
        """The loss of guessing, for pairs with one true partner each."""

    @abstractmethod
    def __call__(self, logits_BB: Tensor, positives_BB: Tensor, smoothing: float = 0.0) -> Tensor:
        """The loss. A row of logits_BB is an image, a column a caption; positives_BB marks true pairs. `smoothing` is
        the share of the target that all pairs have, where the loss has a use for it."""

    @abstractmethod
    def of_rows(self, by_image: Rows, by_text: Rows, smoothing: float = 0.0) -> Tensor:
        """What some of the images and captions of a batch add to its loss: summed over all of them it is the loss."""


class Rows(NamedTuple):
    """Some images of a batch with all its captions, or some captions with all images. R some of B."""

    logits_RB: Tensor
    positives_RB: Tensor


class SoftmaxLoss(ContrastiveLoss):
    """CLIP's: each image chooses among all captions, and each caption among all images.

    Rows with several positives aim at all of them equally; one without any aims at nothing. With only the diagonal
    marked this is CLIP's loss.
    """

    name = "softmax"
    initial_scale = 1 / 0.07

    def initial_bias(self, batch_size: int) -> None:
        return None

    def chance(self, batch_size: int) -> float:
        return math.log(batch_size)

    def __call__(self, logits_BB: Tensor, positives_BB: Tensor, smoothing: float = 0.0) -> Tensor:
        targets_BB = positives_BB.to(logits_BB.dtype)
        by_image, by_text = _shares(targets_BB, smoothing), _shares(targets_BB.T, smoothing)
        image_loss = F.cross_entropy(logits_BB, by_image)
        text_loss = F.cross_entropy(logits_BB.T, by_text)
        return (image_loss + text_loss) / 2

    def of_rows(self, by_image: Rows, by_text: Rows, smoothing: float = 0.0) -> Tensor:
        size = by_image.logits_RB.shape[1]
        sums = [
            F.cross_entropy(
                logits_RB, _shares(positives_RB.to(logits_RB.dtype), smoothing), reduction="sum"
            )
            for logits_RB, positives_RB in (by_image, by_text)
        ]
        return (sums[0] + sums[1]) / (2 * size)


def _shares(targets_BB: Tensor, smoothing: float) -> Tensor:
    """What each row aims at: its positives equally, and everything with the share `smoothing`; a row without positives
    at nothing, which cross_entropy's own smoothing would not keep to."""
    count_B1 = targets_BB.sum(1, keepdim=True)
    shares_BB = targets_BB / count_B1.clamp(min=1)
    if not smoothing:
        return shares_BB
    return (1 - smoothing) * shares_BB + smoothing / targets_BB.shape[1] * (count_B1 > 0)


class SigmoidLoss(ContrastiveLoss):
    """SigLIP's (Zhai et al. 2023, arXiv 2303.15343): each pair of an image and a caption is true or not, by itself.

    Summed over all pairs and divided by the batch, as published. Several positives in a row are several true pairs.
    """

    name = "sigmoid"
    initial_scale = 10.0

    def initial_bias(self, batch_size: int) -> float:
        """So that a pair is true with probability 1 / B before anything is learnt. The published -10 says the same of
        batches near 22,000, and costs a small run its first steps (open_clip issue 650)."""
        return -math.log(max(batch_size - 1, 1))

    def chance(self, batch_size: int) -> float:
        share = 1 / batch_size
        certain = batch_size == 1
        return 0.0 if certain else -math.log(share) - (batch_size - 1) * math.log1p(-share)

    def __call__(self, logits_BB: Tensor, positives_BB: Tensor, smoothing: float = 0.0) -> Tensor:
        return F.softplus(torch.where(positives_BB, -logits_BB, logits_BB)).sum() / len(logits_BB)

    def of_rows(self, by_image: Rows, by_text: Rows, smoothing: float = 0.0) -> Tensor:
        logits_RB, positives_RB = by_image  # every pair is in the row of its image
        return (
            F.softplus(torch.where(positives_RB, -logits_RB, logits_RB)).sum() / logits_RB.shape[1]
        )


def contrastive_loss(
    image_BE: Tensor,
    text_BE: Tensor,
    scale: Tensor,
    positives_BB: Tensor,
    bias: Tensor | None = None,
    loss: ContrastiveLoss = LOSSES["softmax"],
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A contrastive loss and its logits. image_BE and text_BE are unit length; positives_BB marks true pairs."""
    logits_BB = scale * image_BE @ text_BE.T
    if bias is not None:
        logits_BB = logits_BB + bias
    return loss(logits_BB, positives_BB, smoothing), logits_BB


def contrastive_loss_of_rows(
    image_BE: Tensor,
    text_BE: Tensor,
    rows: slice,
    scale: Tensor,
    positives_BB: Tensor,
    bias: Tensor | None,
    loss: ContrastiveLoss,
    smoothing: float = 0.0,
) -> tuple[Tensor, Rows, Rows]:
    """What some rows of a batch add to a contrastive loss, with the logits of their images and of their captions: for
    batches whose square of logits is too large for one process."""
    by_image_RB, by_text_RB = scale * image_BE[rows] @ text_BE.T, scale * text_BE[rows] @ image_BE.T
    if bias is not None:
        by_image_RB, by_text_RB = by_image_RB + bias, by_text_RB + bias
    by_image, by_text = (
        Rows(by_image_RB, positives_BB[rows]),
        Rows(by_text_RB, positives_BB.T[rows]),
    )
    return loss.of_rows(by_image, by_text, smoothing), by_image, by_text


def distillation_loss(
    image_BE: Tensor, text_BE: Tensor, teacher_image_BE: Tensor, teacher_text_BE: Tensor
) -> Tensor:
    """How far embeddings are from a teacher's: the mean of 1 - cosine over images, plus that over captions.

    All rows are unit length. No negatives are needed, so it does not depend on the size of the batch.
    """
    return (
        2 - (image_BE * teacher_image_BE).sum(1).mean() - (text_BE * teacher_text_BE).sum(1).mean()
    )


WORD_SCALE = 16.0
"""What products of embeddings and word vectors, which start at length one, are multiplied by."""


def word_loss(embeddings_BE: Tensor, words_VE: Tensor, targets_BV: Tensor) -> Tensor:
    """How badly embeddings tell which tokens the captions of their image have: cross-entropy over the vocabulary.

    embeddings_BE are unit length; rows of targets_BV add up to one. A row sees no other, so it does not depend on the
    size of the batch.
    """
    logits_BV = WORD_SCALE * embeddings_BE @ words_VE.T
    return F.cross_entropy(logits_BV, targets_BV)


@torch.no_grad()
def batch_accuracy(logits_BB: Tensor, positives_BB: Tensor) -> tuple[Tensor, Tensor]:
    """The share of captions whose best image is a true one, and of images whose best caption is."""
    t2i = positives_BB.gather(0, logits_BB.argmax(0, keepdim=True)).float().mean()
    i2t = positives_BB.gather(1, logits_BB.argmax(1, keepdim=True)).float().mean()
    return t2i, i2t


@torch.no_grad()
def accuracy_of_rows(by_image: Rows, by_text: Rows) -> tuple[Tensor, Tensor]:
    """What some rows add to both."""
    shares = [
        rows.positives_RB.gather(1, rows.logits_RB.argmax(1, keepdim=True)).float().sum()
        / rows.logits_RB.shape[1]
        for rows in (by_text, by_image)
    ]
    return shares[0], shares[1]

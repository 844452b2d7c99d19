"""The losses: tensors in, scalar out. Shapes: B batch, E embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def contrastive_loss(image_BE: Tensor, text_BE: Tensor, scale: Tensor, positives_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric softmax loss and its logits. image_BE and text_BE are unit length; positives_BB marks true pairs.

    Rows with several positives aim at all of them equally. With only the diagonal marked this is CLIP's loss.
    """
    logits_BB = scale * image_BE @ text_BE.T
    targets_BB = positives_BB.to(logits_BB.dtype)
    image_loss = F.cross_entropy(logits_BB, targets_BB / targets_BB.sum(1, keepdim=True))
    text_loss = F.cross_entropy(logits_BB.T, (targets_BB / targets_BB.sum(0, keepdim=True)).T)
    return (image_loss + text_loss) / 2, logits_BB


def distillation_loss(image_BE: Tensor, text_BE: Tensor, teacher_image_BE: Tensor, teacher_text_BE: Tensor) -> Tensor:
    """How far embeddings are from a teacher's: the mean of 1 - cosine over images, plus that over captions.

    All rows are unit length. No negatives are needed, so it does not depend on the size of the batch.
    """
    return 2 - (image_BE * teacher_image_BE).sum(1).mean() - (text_BE * teacher_text_BE).sum(1).mean()


@torch.no_grad()
def batch_accuracy(logits_BB: Tensor, positives_BB: Tensor) -> tuple[Tensor, Tensor]:
    """The share of captions whose best image is a true one, and of images whose best caption is."""
    t2i = positives_BB.gather(0, logits_BB.argmax(0, keepdim=True)).float().mean()
    i2t = positives_BB.gather(1, logits_BB.argmax(1, keepdim=True)).float().mean()
    return t2i, i2t

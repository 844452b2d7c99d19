from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lapclip.loss import batch_accuracy, contrastive_loss, distillation_loss


def embeddings(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    image, text = torch.randn(2, rows, 8, generator=draw, dtype=torch.float64)
    return F.normalize(image, dim=1), F.normalize(text, dim=1)


def test_with_one_positive_a_row_it_is_clips_loss() -> None:
    image, text = embeddings()
    scale = torch.tensor(14.0, dtype=torch.float64)
    labels = torch.arange(len(image))
    logits = scale * image @ text.T
    expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss, _ = contrastive_loss(image, text, scale, torch.eye(len(image), dtype=torch.bool))
    torch.testing.assert_close(loss, expected)


def test_equal_captions_are_not_punished() -> None:
    """Two pairs share a caption. Marked as positives, pushing them apart makes the loss worse; unmarked, better."""
    together = torch.eye(3, dtype=torch.float64)[[0, 0, 1]]
    apart = F.normalize(together + torch.tensor([[0, 0, 0.3], [0, 0, -0.3], [0, 0, 0]]).double(), dim=1)
    shared = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    scale = torch.tensor(10.0, dtype=torch.float64)

    def loss(rows: torch.Tensor, positives: torch.Tensor) -> float:
        return contrastive_loss(rows, rows, scale, positives)[0].item()

    assert loss(together, shared) < loss(apart, shared)
    assert loss(together, torch.eye(3, dtype=torch.bool)) > loss(apart, torch.eye(3, dtype=torch.bool))
    assert loss(together, shared) == pytest.approx(math.log(2) * 2 / 3, abs=1e-3)


def test_loss_is_symmetric_in_images_and_captions() -> None:
    image, text = embeddings()
    positives = torch.eye(6, dtype=torch.bool)
    positives[0, 3] = positives[3, 0] = True
    scale = torch.tensor(5.0, dtype=torch.float64)
    torch.testing.assert_close(
        contrastive_loss(image, text, scale, positives)[0], contrastive_loss(text, image, scale, positives.T)[0]
    )


def test_distance_from_a_teacher_is_zero_at_its_embeddings_and_grows_with_the_angle() -> None:
    image, text = embeddings()
    assert distillation_loss(image, text, image, text).item() == pytest.approx(0, abs=1e-12)
    assert distillation_loss(-image, text, image, text).item() == pytest.approx(2)
    right = torch.eye(4, dtype=torch.float64)
    turned = right.roll(1, dims=1)  # each at a right angle
    assert distillation_loss(turned, right, right, right).item() == pytest.approx(1)
    image.requires_grad_()
    distillation_loss(F.normalize(image, dim=1), text, text, text).backward()
    assert image.grad is not None
    closer = F.normalize(image - image.grad, dim=1)
    assert (closer * text).sum() > (image * text).sum()


def test_accuracy_counts_every_true_pair() -> None:
    logits = torch.tensor([[1.0, 5.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 3.0]])
    only_diagonal = torch.eye(3, dtype=torch.bool)
    t2i, i2t = batch_accuracy(logits, only_diagonal)
    assert (round(t2i.item(), 4), round(i2t.item(), 4)) == (0.6667, 0.6667)
    positives = only_diagonal.clone()
    positives[0, 1] = positives[1, 0] = True
    assert [value.item() for value in batch_accuracy(logits, positives)] == [1.0, 1.0]

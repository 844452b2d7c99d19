from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lapclip.config import TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.inputs import Inputs
from lapclip.training.objectives import Objectives, loss_rows
from lapclip.training.objectives.contrastive import LOSSES, batch_accuracy, contrastive_loss
from lapclip.training.objectives.distillation import Distillation
from lapclip.training.objectives.predicted_words import word_loss


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


def test_smoothing_gives_all_pairs_a_share_of_the_target() -> None:
    image, text = embeddings()
    scale, positives = (
        torch.tensor(14.0, dtype=torch.float64),
        torch.eye(len(image), dtype=torch.bool),
    )
    logits = scale * image @ text.T
    aim = 0.8 * torch.eye(len(image), dtype=torch.float64) + 0.2 / len(image)
    expected = (F.cross_entropy(logits, aim) + F.cross_entropy(logits.T, aim)) / 2
    torch.testing.assert_close(
        contrastive_loss(image, text, scale, positives, smoothing=0.2)[0], expected
    )


def test_words_are_predicted_from_each_embedding_by_itself() -> None:
    image, words = embeddings()
    targets = torch.softmax(torch.arange(36.0, dtype=torch.float64).reshape(6, 6) % 5, dim=1)
    loss = word_loss(image, words, targets, 6)
    by_row = [word_loss(image[[at]], words, targets[[at]], 6) for at in range(6)]
    torch.testing.assert_close(loss, torch.stack(by_row).sum())
    right = torch.eye(6, dtype=torch.float64)
    assert word_loss(words, words, right, 6) < word_loss(words.flip(0), words, right, 6)


def test_equal_captions_are_not_punished() -> None:
    """Two pairs share a caption. Marked as positives, pushing them apart makes the loss worse; unmarked, better."""
    together = torch.eye(3, dtype=torch.float64)[[0, 0, 1]]
    apart = F.normalize(
        together + torch.tensor([[0, 0, 0.3], [0, 0, -0.3], [0, 0, 0]]).double(), dim=1
    )
    shared = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    scale = torch.tensor(10.0, dtype=torch.float64)

    def loss(rows: torch.Tensor, positives: torch.Tensor) -> float:
        return contrastive_loss(rows, rows, scale, positives)[0].item()

    assert loss(together, shared) < loss(apart, shared)
    assert loss(together, torch.eye(3, dtype=torch.bool)) > loss(
        apart, torch.eye(3, dtype=torch.bool)
    )
    assert loss(together, shared) == pytest.approx(math.log(2) * 2 / 3, abs=1e-3)


def test_loss_is_symmetric_in_images_and_captions() -> None:
    image, text = embeddings()
    positives = torch.eye(6, dtype=torch.bool)
    positives[0, 3] = positives[3, 0] = True
    scale = torch.tensor(5.0, dtype=torch.float64)
    torch.testing.assert_close(
        contrastive_loss(image, text, scale, positives)[0],
        contrastive_loss(text, image, scale, positives.T)[0],
    )


def test_each_row_and_each_column_aims_at_its_own_positives() -> None:
    """Image 0 has two true captions, of which one is also image 1's: rows and columns have different counts."""
    image, text = embeddings(3)
    positives = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    scale = torch.tensor(5.0, dtype=torch.float64)
    logits = scale * image @ text.T
    rows = [-logits[row].log_softmax(0)[positives[row]].mean() for row in range(3)]
    columns = [
        -logits[:, column].log_softmax(0)[positives[:, column]].mean() for column in range(3)
    ]
    expected = (torch.stack(rows).mean() + torch.stack(columns).mean()) / 2
    torch.testing.assert_close(contrastive_loss(image, text, scale, positives)[0], expected)


def test_the_names_of_losses_are_the_choices_of_the_setting() -> None:
    assert set(LOSSES) == set(TrainConfig.__dataclass_fields__["loss"].metadata["choices"])


@pytest.mark.parametrize("several", [False, True], ids=["one positive", "several positives"])
def test_the_sigmoid_loss_judges_each_pair_by_itself(several: bool) -> None:
    image, text = embeddings()
    positives = torch.eye(6, dtype=torch.bool)
    positives[0, 3] = positives[3, 0] = several
    scale, bias = torch.tensor(7.0, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)
    expected = 0.0
    for row in range(6):
        for column in range(6):
            true = torch.sigmoid(scale * image[row] @ text[column] + bias)
            expected -= torch.log(true if positives[row, column] else 1 - true).item() / 6
    loss, logits = contrastive_loss(image, text, scale, positives, bias, LOSSES["sigmoid"])
    assert loss.item() == pytest.approx(expected)
    torch.testing.assert_close(logits, scale * image @ text.T + bias)


def test_the_sigmoid_loss_is_a_number_where_it_is_very_wrong() -> None:
    """Half precision scales similarities of the wrong sign to large logits: exp would overflow."""
    logits = torch.full((4, 4), 1e4)
    logits.fill_diagonal_(-1e4)
    assert LOSSES["sigmoid"](logits, torch.eye(4, dtype=torch.bool)).item() == pytest.approx(4e4)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("batch_size", [2, 12, 256])
def test_a_loss_of_guessing_is_what_equal_embeddings_give_at_the_start(
    name: str, batch_size: int
) -> None:
    loss = LOSSES[name]
    bias = loss.initial_bias(batch_size)
    at_right_angles = torch.zeros(batch_size, batch_size, dtype=torch.float64)
    found = loss(at_right_angles + (bias or 0.0), torch.eye(batch_size, dtype=torch.bool)).item()
    assert found == pytest.approx(loss.chance(batch_size))
    assert loss.chance(1) == 0


def inputs_of(positives: torch.Tensor, **extras: torch.Tensor) -> Inputs:
    """Inputs of a step that only the loss looks at."""
    tokens = torch.zeros(len(positives), 1, dtype=torch.long)
    return Inputs(tokens[:0], tokens, positives, None, 32, extras=extras)


def distillation_loss(*vectors: torch.Tensor) -> torch.Tensor:
    image, text, teacher_image, teacher_text = vectors
    inputs = inputs_of(
        torch.eye(len(image)).bool(), teacher_image=teacher_image, teacher_text=teacher_text
    )
    embeddings = {"image": image, "text": text}
    rows = loss_rows(CLIP(SHAPES["tiny"]), inputs, embeddings, None)
    return Distillation(TrainConfig()).term(rows).loss


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_terms_of_some_rows_add_up_to_those_of_the_batch(loss: str) -> None:
    """What several processes compute, each of its own rows."""
    config = TrainConfig(
        loss=loss, batch_size=6, label_smoothing=0.1, teacher="any", phrases=0.3, word_weight=0.2
    )
    shape = replace(SHAPES["tiny"], embedding=8, vocabulary=8)
    model, objectives = CLIP(shape), Objectives(config)
    objectives.start(model, is_new=True)
    model.double()
    image, text = embeddings()
    phrases, teacher = text.roll(1, 0), image.roll(1, 1)
    positives = torch.eye(6).bool()
    positives[0, 3] = positives[3, 0] = True
    marked = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    inputs = inputs_of(
        positives,
        teacher_image=teacher,
        teacher_text=text,
        words_BV=torch.softmax(8 * text, 1),
        phrase_tokens_BL=torch.zeros(6, 1),
        phrase_positives_BB=marked,
    )
    inputs = replace(inputs, slicing=objectives.slicing)
    encoded = {"image": image, "text": text, "phrase": phrases}
    whole = objectives.loss(model, inputs, encoded)
    parts = [objectives.loss(model, inputs, encoded, rows) for rows in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total)
    for name in whole.metrics.keys() - {"logit_scale", "logit_bias"}:
        total = parts[0].metrics[name] + parts[1].metrics[name]
        torch.testing.assert_close(total, whole.metrics[name])


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

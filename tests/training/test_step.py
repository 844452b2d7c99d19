from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.measure.phases import PHASES, Stopwatch, measures_phases
from lapclip.model.clip import CLIP
from lapclip.model.freezing import part_of
from lapclip.model.shapes import SHAPES
from lapclip.training.caption_chunks import CHUNKS, MIN_CHUNK_ROWS
from lapclip.training.cuda_graph import make_step
from lapclip.training.objectives import Objectives
from lapclip.training.objectives.contrastive import LOSSES
from lapclip.training.optimizer import make_optimizer
from lapclip.training.precision import FIRST_SCALE, GROW_AFTER, LossScale
from lapclip.training.step import TrainStep

CPU = Cpu()


class PlainAdamW(Cpu):
    """A device where the fused form of AdamW is not trusted, such as MPS."""

    @property
    def fused_adamw(self) -> bool:
        return False


def off() -> Stopwatch:
    return Stopwatch(CPU.synchronise, on=False)


def step_of(**settings) -> TrainStep:
    config = TrainConfig(**{"dtype": "float32", **settings})
    model = CLIP(SHAPES["tiny"], seed=1)
    Objectives(config).start(model, is_new=True)
    step = make_step(model, config, CPU)
    assert isinstance(step, TrainStep)
    return step


def batch_of(rows: int = 8) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30, (rows, 16))
    tokens[:, 9] = 32
    pixels = draw.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(rows, dtype=bool), np.zeros(rows, dtype=bool))


def batch_with_words() -> Batch:
    words = np.random.default_rng(1).random((8, 33)).astype(np.float32)
    return replace(batch_of(), extras={"words_BV": words / words.sum(1, keepdims=True)})


def gradients_of(step: TrainStep) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in step.model.parameters() if p.grad is not None])


def assert_same_gradients(
    one: TrainStep, other: TrainStep, relative: float = 1e-5, absolute: float = 1e-9
) -> None:
    for (name, mine), theirs in zip(
        one.model.named_parameters(), other.model.parameters(), strict=True
    ):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).norm() <= relative * mine.grad.norm() + absolute, name


@pytest.mark.parametrize(
    "changes", [*({"loss": loss} for loss in sorted(LOSSES)), {"optimizer": "muon"}], ids=str
)
def test_repeated_steps_learn_a_batch_by_heart(changes: dict) -> None:
    step, batch = step_of(batch_size=8, **changes), batch_of()
    loss = step.config.loss
    losses = [step(batch, number, 1e-3, off())().loss for number in range(1, 61)]
    assert losses[0] > LOSSES[loss].chance(8) - 0.5
    assert losses[-1] < 0.2


def test_the_bias_of_the_sigmoid_loss_starts_where_guessing_is_and_learns() -> None:
    step = step_of(loss="sigmoid", batch_size=8)
    metrics = [step(batch_of(), number, 1e-3, off())() for number in (1, 2, 3)]
    assert metrics[0].scalars["logit_bias"] == pytest.approx(-math.log(7))
    assert metrics[0].scalars["logit_scale"] == pytest.approx(math.log(10))
    assert metrics[2].scalars["logit_bias"] != metrics[0].scalars["logit_bias"]
    assert "bias" in metrics[0].part_norms


def test_another_loss_starts_with_its_own_scale_and_the_same_goes_on_with_what_was_learnt() -> None:
    model = CLIP(SHAPES["tiny"])
    model.logit_scale.data.fill_(4.0)
    Objectives(TrainConfig()).start(model, is_new=False)
    assert model.logit_scale.item() == 4.0
    sigmoid = TrainConfig(loss="sigmoid", batch_size=8)
    Objectives(sigmoid).start(model, is_new=False)
    assert model.logit_scale.item() == pytest.approx(math.log(10))
    assert model.logit_bias is not None
    assert model.shape.logit_bias
    model.logit_bias.data.fill_(-3.0)
    sigmoid = TrainConfig(loss="sigmoid", batch_size=8)
    Objectives(sigmoid).start(model, is_new=False)
    assert model.logit_bias.item() == -3.0
    Objectives(TrainConfig()).start(model, is_new=False)
    assert model.logit_bias is None
    assert model.logit_scale.item() == pytest.approx(-math.log(0.07))


def test_words_are_learnt_beside_the_loss_that_is_shown() -> None:
    batch = batch_with_words()
    alone, both = step_of(), step_of(word_weight=0.5)
    first = [step(batch, 1, 1e-3, off())() for step in (alone, both)]
    assert first[1].loss == first[0].loss  # what guessing is compared with
    assert "word_loss" not in first[0].scalars
    assert first[1].scalars["word_loss"] == pytest.approx(
        2 * math.log(33), rel=0.5
    )  # of both towers, and vectors are random
    assert "words" in first[1].part_norms
    later = [both(batch, number, 3e-3, off())() for number in range(2, 60)][-1]
    assert later.scalars["word_loss"] < 0.95 * first[1].scalars["word_loss"]
    assert later.loss < 0.5 * first[1].loss


def test_norms_by_part_add_up_to_the_whole() -> None:
    step = step_of(clip_norm=0.0)
    metrics = step(batch_of(), 1, 1e-3, off())()
    assert math.hypot(*metrics.part_norms.values()) == pytest.approx(metrics.grad_norm, rel=1e-5)
    assert gradients_of(step).norm().item() == pytest.approx(metrics.grad_norm, rel=1e-5)


def test_long_gradients_are_shortened() -> None:
    step = step_of(clip_norm=0.01)
    assert step(batch_of(), 1, 1e-3, off())().grad_norm > 0.01
    assert gradients_of(step).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_optimiser_shortens_gradients_as_a_pass_of_its_own_would() -> None:
    """The fused kernel divides on its way; elsewhere, as on MPS, the gradients are divided first."""
    fused, plain = step_of(clip_norm=0.01), step_of(clip_norm=0.01)
    plain.device = PlainAdamW()
    plain.optimizer = make_optimizer(plain.model, plain.config, plain.device)
    assert not any(group["fused"] for group in plain.optimizer.param_groups)
    for number in range(1, 4):
        for step in (fused, plain):
            step(batch_of(), number, 1e-3, off())()
    for one, other in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_parts_are_named_after_towers_and_blocks() -> None:
    parts = step_of().parts
    assert set(parts) == {
        f"{tower}.{part}" for tower in ("image", "text") for part in ("embedding", "0", "1", "head")
    } | {"temperature"}
    assert part_of("text.token_embedding.weight") == "text.embedding"
    assert part_of("image.transformer.blocks.11.mlp.0.bias") == "image.11"


def batch_with_teacher() -> Batch:
    rows = np.random.default_rng(1).normal(size=(2, 8, 64)).astype(np.float32)
    image, text = rows / np.linalg.norm(rows, axis=2, keepdims=True)
    return replace(batch_of(), extras={"teacher_image": image, "teacher_text": text})


def with_phrases(batch: Batch) -> Batch:
    true = np.random.default_rng(1).random((8, 8)) < 0.3
    true[5] = False  # an image that none of the phrases is true of
    phrases = batch.tokens_BL[::-1, 4:12].copy()
    extras = {"phrase_tokens_BL": phrases, "phrase_positives_BB": true}
    return replace(batch, extras=batch.extras | extras)


MICRO_BATCHED = {
    "plain": (batch_with_words, {}),
    "sigmoid": (batch_with_words, {"loss": "sigmoid"}),
    "words": (batch_with_words, {"word_weight": 0.5}),
    "crops": (batch_with_words, {"crop": 0.5, "flip": 0.5, "cheap_size": 16}),
    "two crops": (batch_of, {"consistency": 0.5, "crop": 0.5, "cheap_size": 16}),
    "other forms": (batch_with_words, {"recompute": True, "linear": "onednn"}),
    "teacher": (batch_with_teacher, {"teacher": "any", "teacher_weight": 0.7}),
    "phrases": (lambda: with_phrases(batch_of()), {"phrases": 0.4}),
    "phrases, sigmoid": (lambda: with_phrases(batch_of()), {"phrases": 0.4, "loss": "sigmoid"}),
    "phrases, teacher": (
        lambda: with_phrases(batch_with_teacher()),
        {"phrases": 0.4, "teacher": "any", "teacher_weight": 0.7},
    ),
}


NAMED_METRICS = {
    "two crops": 1,
    "sigmoid": 1,
    "words": 1,
    "teacher": 2,
    "phrases": 1,
    "phrases, sigmoid": 2,
    "phrases, teacher": 3,
}
"""Metrics that cases have beside those of every step."""


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8])
@pytest.mark.parametrize("case", MICRO_BATCHED)
def test_micro_batches_give_the_gradients_of_the_whole_batch(micro_batch: int, case: str) -> None:
    make_batch, changes = MICRO_BATCHED[case]
    settings = {"clip_norm": 0.0, "steps": 10, "cheap_share": 0.5, **changes}
    batch = make_batch()
    batch.positives_BB[0, 1] = batch.positives_BB[1, 0] = True
    whole, parts = step_of(**settings), step_of(**settings, micro_batch=micro_batch)
    whole_metrics, parts_metrics = (step(batch, 3, 0.0, off())() for step in (whole, parts))
    assert parts_metrics.scalars == pytest.approx(whole_metrics.scalars, rel=1e-5)
    assert len(whole_metrics.scalars) == 5 + NAMED_METRICS.get(case, 0)
    assert_same_gradients(whole, parts)


def test_the_shown_loss_has_the_teachers_part_but_not_that_of_phrases() -> None:
    plain = step_of()(batch_of(), 1, 0.0, off())()
    taught = step_of(teacher="any", teacher_weight=0.7)(batch_with_teacher(), 1, 0.0, off())()
    phrased = step_of(phrases=0.4)(with_phrases(batch_of()), 1, 0.0, off())()
    assert plain.scalars.keys() & {"teacher_loss", "phrase_loss", "contrastive_loss"} == set()
    taught_loss = 0.3 * plain.loss + 0.7 * taught.scalars["teacher_loss"]
    assert taught.loss == pytest.approx(taught_loss, rel=1e-5)
    assert taught.scalars["contrastive_loss"] == pytest.approx(plain.loss, rel=1e-6)
    assert phrased.loss == pytest.approx(plain.loss, rel=1e-6)
    assert 0 < phrased.scalars["phrase_loss"] < math.inf


def test_phrases_find_all_images_they_are_true_of() -> None:
    batch = batch_of()
    true = (
        np.arange(8)[:, None] % 2 == np.arange(8)[None, :] % 2
    )  # two phrases, each of four images
    tokens = batch.tokens_BL[np.arange(8) % 2][:, :12].copy()
    batch = replace(batch, extras={"phrase_tokens_BL": tokens, "phrase_positives_BB": true})
    step = step_of(phrases=0.5, batch_size=8)
    metrics = [step(batch, number, 1e-3, off())() for number in range(1, 61)]
    losses = [each.scalars["phrase_loss"] for each in metrics]
    assert losses[0] > math.log(8) - 0.5
    assert losses[-1] == pytest.approx(math.log(4), abs=0.1)  # four are right, and equally so


def test_two_crops_of_an_image_come_together() -> None:
    close, free = (
        step_of(consistency=weight, crop=0.5, flip=0.5, batch_size=8) for weight in (5.0, 1e-9)
    )
    inputs = [close.inputs(batch_of(), number) for number in (1, 1, 2)]
    first, again, other = (each.extras["second_crop_boxes_B5"] for each in inputs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert inputs[0].boxes_B5 is not None
    assert not torch.equal(first, inputs[0].boxes_B5)
    distances = []
    for step in (close, free):
        metrics = [step(batch_of(), number, 1e-3, off())() for number in range(1, 41)]
        distances.append(np.mean([each.scalars["consistency_loss"] for each in metrics[-10:]]))
    assert distances[0] < 0.97 * distances[1]
    assert distances[0] < 0.9 * math.log(8)  # the loss of guessing


REFUSED = {
    "no crops": ({}, "train.crop is 1"),
    "frozen features": ({"crop": 0.5, "image_blocks": 0, "views": 4}, "frozen image features"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_consistency_is_refused_without_new_crops(case: str) -> None:
    settings, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        Objectives(TrainConfig(consistency=0.5, **settings)).check()
    Objectives(TrainConfig(consistency=0.5, crop=0.5)).check()


def test_images_are_cropped_only_when_asked_and_as_the_step_says() -> None:
    assert step_of().inputs(batch_of(), 1).boxes_B5 is None
    step = step_of(crop=0.5)
    first, again, other = (step.inputs(batch_of(), number).boxes_B5 for number in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_plain_accumulation_would_not_pass_the_test_above() -> None:
    """With half the negatives the loss and its gradients are others: the reason for gradient caching."""
    batch, half = batch_of(8), batch_of(4)
    assert abs(step_of()(batch, 1, 0.0, off())().loss - step_of()(half, 1, 0.0, off())().loss) > 0.3


def test_bfloat16_gives_nearly_the_float32_loss() -> None:
    plain = step_of()(batch_of(), 1, 0.0, off())().loss
    half = step_of(dtype="bfloat16")(batch_of(), 1, 0.0, off())().loss
    assert half == pytest.approx(plain, rel=0.02)
    assert half != plain


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("micro_batch", [0, 3])
def test_half_precision_learns_and_keeps_float32_weights(
    dtype: str, micro_batch: int, loss: str
) -> None:
    step, batch = step_of(dtype=dtype, micro_batch=micro_batch, loss=loss, batch_size=8), batch_of()
    losses = [step(batch, number, 2e-3, off())().loss for number in range(1, 31)]
    assert losses[-1] < 0.3
    assert all(parameter.dtype == torch.float32 for parameter in step.model.parameters())


@pytest.mark.parametrize("micro_batch", [0, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gradients_point_where_the_exact_ones_do(
    dtype: str, micro_batch: int
) -> None:
    exact, half = (
        step_of(clip_norm=0.0),
        step_of(clip_norm=0.0, dtype=dtype, micro_batch=micro_batch),
    )
    if half.loss_scale:
        half.loss_scale.state[0] = 2.0**8  # where it would settle here
    norms = [step(batch_of(), 1, 0.0, off())().grad_norm for step in (exact, half)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert_same_gradients(exact, half, relative=0.05, absolute=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_leaves_out_updates_that_overflow_and_lowers_its_scale(optimizer: str) -> None:
    step = step_of(dtype="float16", optimizer=optimizer)
    assert step.loss_scale is not None
    step.loss_scale.state[0] = 2.0**40
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    metrics = step(batch_of(), 1, 1e-3, off())()
    assert not math.isfinite(metrics.grad_norm)
    assert math.isfinite(metrics.loss)
    assert step.loss_scale.scale == 2.0**39
    assert all(
        torch.equal(one, other) for one, other in zip(before, step.model.parameters(), strict=True)
    )
    last = [step(batch_of(), 1, 1e-3, off())() for _ in range(40)][-1]
    assert math.isfinite(last.grad_norm)
    assert last.loss < metrics.loss


def test_the_scale_of_the_loss_grows_again() -> None:
    scale = LossScale(torch.device("cpu"))
    for _ in range(GROW_AFTER):
        scale.update(torch.tensor(False))
    assert scale.state.tolist() == [2 * FIRST_SCALE, 0.0]


def test_phases_are_measured_only_when_asked() -> None:
    watch = Stopwatch(CPU.synchronise, on=True)
    step_of()(batch_of(), 1, 1e-3, watch)
    assert watch.seconds is not None
    assert set(watch.seconds) == set(PHASES)
    assert all(watch.seconds[phase] > 0 for phase in PHASES if phase != "load")
    assert off().seconds is None
    assert [measures_phases(number) for number in (1, 10, 11, 50, 51)] == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_captions_taken_in_parts_by_length_give_the_same_step() -> None:
    """On the CPU a batch of many captions is taken in parts that need less padding."""
    rows = 2 * CHUNKS * MIN_CHUNK_ROWS
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30, (rows, 16))
    ends_B = np.linspace(3, 15, rows).astype(int)
    tokens[np.arange(rows), ends_B] = 32
    pixels = draw.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
    batch = Batch(
        pixels, tokens, np.eye(rows, dtype=bool), np.zeros(rows, dtype=bool), lengths_B=ends_B + 1
    )
    parted, whole = step_of(), step_of()
    assert parted.inputs(batch, 1).lengths == (8, 16, 16, 16)
    parted(batch, 1, 1e-3, off())()
    whole(replace(batch, lengths_B=None), 1, 1e-3, off())()
    for (name, one), (_, other) in zip(
        parted.model.named_parameters(), whole.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3, msg=name)

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.convnet import ConvolutionTower, standardised
from lapclip.model.freezing import part_of
from lapclip.model.shapes import SHAPES
from lapclip.model.sizes import convolution_sizes
from lapclip.training.cuda_graph import make_step
from lapclip.training.step import TrainStep

SMALL = replace(
    SHAPES["photos"],
    image_size=48,
    image_width=8,
    text_width=32,
    text_heads=2,
    embedding=16,
    vocabulary=40,
    context=16,
)
CPU = Cpu()


def images(count: int = 3, side: int = 48) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def tower(shape: ModelConfig = SMALL) -> ConvolutionTower:
    image = CLIP(shape, seed=1).image
    assert isinstance(image, ConvolutionTower)
    for (
        module
    ) in image.modules():  # a block that starts as the identity would hide what its convolutions do
        if isinstance(module, torch.nn.GroupNorm):
            torch.nn.init.uniform_(
                module.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(2)
            )
    return image


def test_what_an_image_becomes_does_not_depend_on_the_others() -> None:
    image, pixels = tower().double(), images(4).double()
    alone = torch.cat([image(picture[None]) for picture in pixels])
    torch.testing.assert_close(image(pixels), alone)


def test_weights_are_standardised_and_their_size_does_not_matter() -> None:
    weight = torch.randn(5, 4, 3, 3)
    same = standardised(weight)
    torch.testing.assert_close(same.sum(dim=(1, 2, 3)), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(same.flatten(1).norm(dim=1), torch.ones(5), atol=1e-4, rtol=0)
    torch.testing.assert_close(standardised(3 * weight + 1), same, atol=1e-4, rtol=0)


def test_blocks_start_as_the_identity() -> None:
    image = CLIP(SMALL, seed=1).image
    assert isinstance(image, ConvolutionTower)
    x = torch.rand(2, 8, 12, 12)
    torch.testing.assert_close(image.blocks[0](x), x)


def test_the_tower_sees_images_of_any_size_and_their_sizes_are_known() -> None:
    image = tower()
    seen: list[tuple[int, ...]] = []
    for module in image.modules():
        if isinstance(module, torch.nn.GroupNorm):
            continue
        if type(module).__name__ == "Convolution":
            module.register_forward_hook(
                lambda _, __, result: seen.append((result.shape[1], result.shape[-1]))
            )
    for side in (48, 32, 33):
        seen.clear()
        assert image(images(side=side)).shape == (3, 16)
        assert seen == [(size.outputs, size.side) for size in convolution_sizes(SMALL, side)]


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"4 stages and an even width.*\nTry: --set model.image_layers=8"
    ):
        replace(SMALL, image_layers=6)


def batch_of(rows: int = 12) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 38, (rows, 16))
    for row, end in enumerate(np.linspace(4, 15, rows).astype(int)):
        tokens[row, end] = 39
    pixels = draw.integers(0, 256, (rows, 56, 56, 3), dtype=np.uint8)
    aspects = draw.uniform(0.5, 2, rows)
    return Batch(pixels, tokens, np.eye(rows, dtype=bool), np.zeros(rows, dtype=bool), aspects)


def gradients(**settings) -> tuple[float, torch.Tensor]:
    config = TrainConfig(
        **{"dtype": "float32", "crop": 0.5, "steps": 4, "clip_norm": 0.0, **settings}
    )
    step = make_step(CLIP(SMALL, seed=1), config, CPU)
    assert isinstance(step, TrainStep)
    figures = step(batch_of(), 3, 0.0, Stopwatch(CPU.synchronise, on=False))()
    return figures.loss, torch.cat(
        [p.grad.flatten() for p in step.model.parameters() if p.grad is not None]
    )


def test_micro_batches_give_the_gradients_of_the_whole_batch() -> None:
    loss, whole = gradients()
    loss_in_parts, parts = gradients(micro_batch=4)
    assert loss_in_parts == pytest.approx(loss, rel=1e-5)
    assert F.cosine_similarity(whole, parts, dim=0) > 1 - 1e-6


def test_recomputed_blocks_give_the_same_gradients() -> None:
    assert torch.equal(gradients()[1], gradients(recompute=True)[1])


@pytest.mark.parametrize("width", [6, 34, 50])
def test_any_even_width_can_be_had(width: int) -> None:
    assert tower(replace(SMALL, image_width=width))(images()).shape == (3, 16)


def test_bfloat16_agrees_with_float32() -> None:
    loss, whole = gradients()
    loss_rounded, rounded = gradients(dtype="bfloat16")
    assert loss_rounded == pytest.approx(loss, rel=0.02)
    assert F.cosine_similarity(whole, rounded, dim=0) > 0.98


def test_gradients_are_told_by_block() -> None:
    parts = {part_of(name) for name, _ in CLIP(SMALL).named_parameters()}
    assert {
        "image.embedding",
        "image.0",
        "image.7",
        "image.head",
        "text.0",
        "text.head",
        "temperature",
    } <= parts

"""Trimmed captions and the pooled last block give what the plain computation gives, outputs and gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lapclip.model.block import Block
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.model.shapes import SHAPES
from lapclip.model.towers import ImageTower, TextTower, resampling

SHAPE = dataclasses.replace(SHAPES["tiny"], text_layers=3, image_layers=3)
CONTEXT, END, START = SHAPE.context, SHAPE.vocabulary - 1, SHAPE.vocabulary - 3


def model() -> CLIP:
    return CLIP(SHAPE, seed=3).double()


def plain_block(block: Block, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The block as it is written in books."""
    normed, attention = block.ln_1(x), block.attention
    query, key, value = (
        part.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for part in (normed @ attention.qkv.weight.T + attention.qkv.bias).chunk(3, dim=-1)
    )
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(-2)
    x = x + mixed @ attention.out.weight.T + attention.out.bias
    hidden = torch.nn.functional.gelu(block.ln_2(x) @ block.mlp_in.weight.T + block.mlp_in.bias)
    return x + hidden @ block.mlp_out.weight.T + block.mlp_out.bias


def plain_text(clip: CLIP, tokens: torch.Tensor) -> torch.Tensor:
    """Every token through every block, then the end token picked out."""
    text = clip.text
    assert isinstance(text, TextTower)
    x = text.token_embedding(tokens) + text.position_embedding[: tokens.shape[1]]
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    for block in text.transformer.layers():
        x = plain_block(block, x, mask)
    end = (tokens == END).int().argmax(dim=1)
    return text.ln_final(x)[torch.arange(len(x)), end] @ text.projection


def tower(clip: CLIP) -> ImageTower:
    assert isinstance(clip.image, ImageTower)
    return clip.image


def plain_image(clip: CLIP, pixels: torch.Tensor) -> torch.Tensor:
    """The patch convolution, every token through every block, then the class token picked out."""
    image = tower(clip)
    patches = (
        torch.nn.functional.conv2d(pixels, image.patch_weight, stride=image.patch)
        .flatten(2)
        .transpose(1, 2)
    )
    x = (
        torch.cat([image.class_embedding.expand(len(pixels), 1, -1), patches], dim=1)
        + image.position_embedding
    )
    x = image.ln_pre(x)
    for block in image.transformer.layers():
        x = plain_block(block, x)
    return image.ln_post(x[:, 0]) @ image.projection


def captions(*lengths: int) -> torch.Tensor:
    """Random captions of those lengths, start and end included, padded to the whole context."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.full((len(lengths), CONTEXT), START)
    for row, length in enumerate(lengths):
        tokens[row, 1 : length - 1] = torch.randint(0, START, (length - 2,), generator=draw)
        tokens[row, length - 1] = END
    return tokens


def gradients(clip: CLIP, output: torch.Tensor) -> dict[str, torch.Tensor]:
    clip.zero_grad()
    output.square().sum().backward()
    return {name: p.grad.clone() for name, p in clip.named_parameters() if p.grad is not None}


def assert_same(clip: CLIP, fast: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    fast_gradients, plain_gradients = gradients(clip, fast), gradients(clip, plain)
    assert fast_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


COMPUTES = [
    Compute(),
    Compute(attention="products"),
    Compute(attention="products", recompute=True),
]


@pytest.mark.parametrize("compute", COMPUTES, ids=["fused", "products", "recompute"])
@pytest.mark.parametrize(
    "lengths", [(2, 2), (8, 8), (76, 76), (77, 77), (2, 77), (5, 8, 13), (77, 3, 9, 40, 2, 65, 8)]
)
def test_text_tower_equals_plain_path_for_trimmed_captions(
    lengths: tuple[int, ...], compute: Compute
) -> None:
    clip, tokens = model(), captions(*lengths)
    clip.compute_with(compute, compute)
    trimmed = tokens[:, : min(CONTEXT, -(-max(lengths) // 8) * 8)]
    assert_same(clip, clip.text(trimmed), plain_text(clip, tokens))


@pytest.mark.parametrize("compute", COMPUTES, ids=["fused", "products", "recompute"])
def test_image_tower_equals_plain_path(compute: Compute) -> None:
    clip = model()
    clip.compute_with(compute, compute)
    pixels = torch.randn(
        4, 3, SHAPE.image_size, SHAPE.image_size, generator=torch.Generator().manual_seed(1)
    ).double()
    assert_same(clip, clip.image(pixels), plain_image(clip, pixels))


def test_smaller_images_see_the_middle_of_the_position_embeddings() -> None:
    """Interpolation keeps what is constant, and keeps left to the left."""
    with torch.inference_mode():  # made in an evaluation, used in training
        matrix = resampling(4, 2, torch.device("cpu"))
    assert matrix.shape == (4, 16)
    torch.testing.assert_close(matrix.sum(1), torch.ones(4))
    columns = torch.arange(4.0).repeat(4)
    left, right = (matrix @ columns).view(2, 2).T
    assert (left < right).all()
    clip = model()
    half = torch.randn(2, 3, SHAPE.image_size // 2, SHAPE.image_size // 2).double()
    clip.image(half).sum().backward()
    positions = tower(clip).position_embedding
    assert positions.grad is not None
    assert (positions.grad.norm(dim=1) > 0).all()
    positions.data[1:] = positions[1]  # alike everywhere: nothing to interpolate
    few = CLIP(dataclasses.replace(SHAPE, image_size=SHAPE.image_size // 2), seed=3).double()
    few.load_state_dict({**clip.state_dict(), "image.position_embedding": positions[:5]})
    torch.testing.assert_close(clip.image(half), few.image(half))


def test_quick_gelu_is_openais_and_the_mlp_may_have_any_width() -> None:
    block = Block(8, 2, causal=False, hidden=20, activation="quick_gelu").double()
    x = torch.randn(3, 5, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    assert block.mlp_in.weight.shape == (20, 8)
    inner = x @ block.mlp_in.weight.T + block.mlp_in.bias
    expected = (
        x + (inner * torch.sigmoid(1.702 * inner)) @ block.mlp_out.weight.T + block.mlp_out.bias
    )
    torch.testing.assert_close(block._mlp(x, x), expected, atol=1e-12, rtol=1e-12)

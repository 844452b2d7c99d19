"""CLIP: two towers into one space, and a learnt temperature.

Shapes: B batch, C colour channels, S picture side, K patches kept, L tokens, E embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.config import ModelConfig
from lapclip.model.towers import ImageTower, TextTower
from lapclip.model.transformer import Transformer

START_LOGIT_SCALE = math.log(1 / 0.07)
MAX_LOGIT_SCALE = math.log(100)


class CLIP(nn.Module):
    """The parameterisation is OpenAI CLIP's, so that published weights load and parameter counts match."""

    def __init__(self, shape: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.image = ImageTower(shape)
        self.text = TextTower(shape)
        self.logit_scale = nn.Parameter(torch.tensor(START_LOGIT_SCALE))
        initialise(self, torch.Generator().manual_seed(seed))

    def encode_image(self, pixels_BCSS: Tensor, kept_BK: Tensor | None = None) -> Tensor:
        """Unit-length embeddings of pictures."""
        return F.normalize(self.image(pixels_BCSS, kept_BK).float(), dim=-1)

    def encode_text(self, tokens_BL: Tensor) -> Tensor:
        """Unit-length embeddings of captions."""
        return F.normalize(self.text(tokens_BL).float(), dim=-1)

    @torch.no_grad()
    def hold_temperature(self) -> None:
        """Keep the logit scale at or below ln 100, as CLIP does, after each update."""
        self.logit_scale.clamp_(max=MAX_LOGIT_SCALE)


def count_parameters(module: nn.Module) -> int:
    """How many numbers the module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def initialise(model: CLIP, generator: torch.Generator) -> None:
    """CLIP's initial values: residual branches shrink with depth, embeddings start small."""

    def normal(tensor: Tensor, std: float) -> None:
        tensor.normal_(0.0, std, generator=generator)

    image, text = model.image, model.text
    image_width, text_width = model.shape.image_width, model.shape.text_width
    normal(image.patch_weight, (3 * image.patch**2) ** -0.5)
    normal(image.class_embedding, image_width**-0.5)
    normal(image.position_embedding, image_width**-0.5)
    normal(text.token_embedding.weight, 0.02)
    normal(text.position_embedding, 0.01)
    for tower, width in ((image, image_width), (text, text_width)):
        _initialise_blocks(tower.transformer, width, normal)
        normal(tower.projection, width**-0.5)


def _initialise_blocks(transformer: Transformer, width: int, normal) -> None:
    branch_std = width**-0.5 * (2 * len(transformer.blocks)) ** -0.5
    for block in transformer.blocks:
        for linear, std in (
            (block.attention.qkv, width**-0.5),
            (block.attention.out, branch_std),
            (block.mlp[0], (2 * width) ** -0.5),
            (block.mlp[2], branch_std),
        ):
            normal(linear.weight, std)
            linear.bias.zero_()

"""CLIP: two towers into one space, and a learnt scale (and, for the sigmoid loss, a bias) of their similarities.

Shapes: B batch, C colour channels, S image side, L tokens, E embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.config import ModelConfig
from lapclip.model.convnet import ConvolutionTower
from lapclip.model.kernels import Compute
from lapclip.model.pretrained_towers import (
    Network,
    PretrainedImageTower,
    PretrainedTextTower,
    PretrainedTower,
    TowerSpec,
)
from lapclip.model.towers import ImageTower, SiglipImageTower, SiglipTextTower, TextTower

EMPTY: Mapping[str, Network] = MappingProxyType({})

START_LOGIT_SCALE = math.log(1 / 0.07)
MAX_LOGIT_SCALE = math.log(100)


class CLIP(nn.Module):
    """The parameterisation is OpenAI CLIP's, or SigLIP's, so that parameter counts match and published weights fit."""

    def __init__(
        self, shape: ModelConfig, *, seed: int = 0, networks: Mapping[str, Network] = EMPTY
    ) -> None:
        """`networks` are the pretrained ones that stand in for a tower: "image", "text", or both."""
        super().__init__()
        self.shape = shape
        self.image, self.text = (
            _image_tower(shape, networks.get("image")),
            _text_tower(shape, networks.get("text")),
        )
        self.logit_scale = nn.Parameter(torch.tensor(START_LOGIT_SCALE))
        self.logit_bias: nn.Parameter | None
        self.register_parameter(
            "logit_bias", nn.Parameter(torch.zeros(())) if shape.logit_bias else None
        )
        self.training_parameters: list[str] = []
        """Names of parameters that only objectives need. They are no part of a saved model."""
        if (
            not self.logit_scale.is_meta
        ):  # which has no values; drawing them there loads torch's compiler all the same
            initialise(self, torch.Generator().manual_seed(seed))

    def encode_image(self, pixels_BCSS: Tensor) -> Tensor:
        """Return unit-length embeddings of images."""
        return F.normalize(self.image(pixels_BCSS).float(), dim=-1)

    def encode_text(self, tokens_BL: Tensor) -> Tensor:
        """Unit-length embeddings of captions."""
        return F.normalize(self.text(tokens_BL).float(), dim=-1)

    def finish_image(self, features: Tensor, block: int) -> Tensor:
        """Unit-length embeddings of images, from what enters a block of their tower."""
        return F.normalize(self.image.finish(features, block).float(), dim=-1)

    def finish_text(self, features: Tensor, tokens_BL: Tensor, block: int) -> Tensor:
        """Unit-length embeddings of captions, from what enters a block of their tower."""
        return F.normalize(self.text.finish(features, tokens_BL, block).float(), dim=-1)

    def networks(self) -> dict[str, TowerSpec]:
        """What the foreign networks among the towers are."""
        towers = {"image": self.image, "text": self.text}
        return {
            name: tower.spec for name, tower in towers.items() if isinstance(tower, PretrainedTower)
        }

    def tower_devices(self) -> dict[str, str]:
        """The kind of device that each tower really is on."""
        return {
            tower: next(getattr(self, tower).parameters()).device.type
            for tower in ("image", "text")
        }

    def compute_with(self, image: Compute, text: Compute) -> None:
        """Change how each tower computes; what it computes stays the same, up to rounding."""
        for tower, compute in ((self.image, image), (self.text, text)):
            for module in tower.modules():
                if hasattr(module, "compute"):
                    setattr(module, "compute", compute)  # noqa: B010 (attributes of a Module are unknown to pyright)

    @torch.no_grad()
    def start_logits(self, scale: float, bias: float | None) -> None:
        """Set the scale and the bias to start with, or remove the bias."""
        self.logit_scale.fill_(math.log(scale))
        value = (
            None
            if bias is None
            else nn.Parameter(torch.tensor(bias, device=self.logit_scale.device))
        )
        self.register_parameter("logit_bias", value)
        self.shape = replace(self.shape, logit_bias=bias is not None)

    def add_training_parameter(self, name: str, values: Tensor) -> None:
        """Add a parameter that trains with the model but is no part of what is saved."""
        self.register_parameter(name, nn.Parameter(values.to(self.logit_scale.device)))
        self.training_parameters.append(name)

    @torch.no_grad()
    def hold_temperature(self) -> None:
        """Keep the logit scale at or below ln 100, as CLIP does, after each update. SigLIP's are beyond that."""
        if self.shape.architecture == "clip":
            self.logit_scale.clamp_(max=MAX_LOGIT_SCALE)


def _image_tower(
    shape: ModelConfig, network: Network | None
) -> ImageTower | ConvolutionTower | PretrainedImageTower:
    assert network or not shape.image_from, "a pretrained tower needs its network"
    if network:
        return PretrainedImageTower(network, shape)
    if shape.architecture == "siglip":
        return SiglipImageTower(shape)
    return ConvolutionTower(shape) if shape.image_tower == "convolutions" else ImageTower(shape)


def _text_tower(shape: ModelConfig, network: Network | None) -> TextTower | PretrainedTextTower:
    assert network or not shape.text_from, "a pretrained tower needs its network"
    if network:
        return PretrainedTextTower(network, shape)
    return SiglipTextTower(shape) if shape.architecture == "siglip" else TextTower(shape)


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers the module has, without those that only training has."""
    left_out = module.training_parameters if isinstance(module, CLIP) else []
    return sum(p.numel() for name, p in module.named_parameters() if name not in left_out)


def initialise(model: CLIP, generator: torch.Generator) -> None:
    """CLIP's initial values: embeddings start small, towers as their blocks say."""
    for tower in (model.image, model.text):
        tower.initialise_ends(generator)
    for tower in (model.image, model.text):
        tower.initialise_blocks(generator)

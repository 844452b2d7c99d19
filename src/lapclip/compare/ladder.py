"""Models of growing size and the work of a training step of each: what `lapclip compare` climbs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lapclip.config import ModelConfig
from lapclip.model.clip import CLIP, count_parameters
from lapclip.tuning.flops import operations, step_products

CAPTION_TOKENS = 32
"""About a sentence."""
BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Rung:
    """A size of model: both towers as wide and deep as each other, images of 224 pixels in patches of 32."""

    width: int
    layers: int

    @cached_property
    def shape(self) -> ModelConfig:
        return ModelConfig(
            name=f"{self.width} wide, {self.layers} deep",
            image_size=224,
            patch=32,
            image_width=self.width,
            image_layers=self.layers,
            image_heads=self.width // 64,
            text_width=self.width,
            text_layers=self.layers,
            text_heads=self.width // 64,
            embedding=self.width,
            vocabulary=512,
            context=77,
        )

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):  # counts without filling memory
            return count_parameters(CLIP(self.shape))

    def work(self, batch: int) -> float:
        """Operations of a training step."""
        return operations(step_products(self.shape, batch, CAPTION_TOKENS))


MEASURED = (Rung(128, 2), Rung(192, 6), Rung(384, 8), Rung(512, 12), Rung(768, 12), Rung(1024, 12), Rung(1024, 20))
"""1 M to 500 M parameters."""
PREDICTED = (Rung(768, 14), Rung(1024, 20), Rung(1280, 25))
"""200 M, 500 M and 1 B parameters: the scaling study."""

"""One tower as a program of its own: images or tokens in, unit-length embeddings out.

The scaling of pixels is part of the image tower, so that no other program can get it wrong.

Shapes: B batch, S image side, C colour channels, L tokens, E embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.embedder import Embedder
from lapclip.model.clip import CLIP


class ImageProgram(nn.Module):
    """uint8 pixels, channels last, as `lapclip.data.pixels` cuts them; or channels first, as Core ML gives them."""

    pixel_mean: Tensor
    pixel_deviation: Tensor

    def __init__(self, model: CLIP, *, channels_first: bool = False) -> None:
        super().__init__()
        self.tower, self.channels_first = model.image, channels_first
        # Made here, not by `normalise`, which keeps them for later: what follows a program must not get in there.
        for name, text in (
            ("pixel_mean", model.shape.pixel_mean),
            ("pixel_deviation", model.shape.pixel_std),
        ):
            numbers = 255 * torch.tensor([float(number) for number in text.split()])
            self.register_buffer(name, numbers.view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        pixels_BCSS = pixels if self.channels_first else pixels.permute(0, 3, 1, 2)
        return F.normalize(
            self.tower((pixels_BCSS.float() - self.pixel_mean) / self.pixel_deviation), dim=-1
        )


class TextProgram(nn.Module):
    """Tokens of captions, padded behind their end."""

    def __init__(self, model: CLIP) -> None:
        super().__init__()
        self.tower = model.text

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.tower(tokens), dim=-1)


def programs(embedder: Embedder) -> dict[str, nn.Module]:
    model = embedder.model
    return {"image": ImageProgram(model).eval(), "text": TextProgram(model).eval()}

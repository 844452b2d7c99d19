"""The image tower and the text tower of CLIP.

Shapes: B batch, C colour channels, S picture side, P patches, K patches kept, L tokens, D width, E embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapclip.config import ModelConfig
from lapclip.model.transformer import Transformer


class ImageTower(nn.Module):
    """A vision transformer: patches and a class token in, the class token projected out."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        width, self.patch = shape.image_width, shape.patch
        self.patches = (shape.image_size // shape.patch) ** 2
        self.patch_weight = nn.Parameter(torch.empty(width, 3, self.patch, self.patch))
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.position_embedding = nn.Parameter(torch.empty(1 + self.patches, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(width, shape.image_layers, shape.image_heads, causal=False)
        self.ln_post = nn.LayerNorm(width)
        self.projection = nn.Parameter(torch.empty(width, shape.embedding))

    def forward(self, pixels_BCSS: Tensor, kept_BK: Tensor | None = None) -> Tensor:
        """Embeddings before normalisation. kept_BK chooses the patches to look at (patch dropout); None takes all."""
        patches_BPD = self._cut(pixels_BCSS)
        positions_PD = self.position_embedding[1:]
        if kept_BK is None:
            x_BPD = patches_BPD @ self.patch_weight.flatten(1).T + positions_PD
        else:
            # Dropped patches are left out before the first product, so they cost nothing.
            rows_B1 = torch.arange(len(kept_BK), device=kept_BK.device)[:, None]
            x_BPD = patches_BPD[rows_B1, kept_BK] @ self.patch_weight.flatten(1).T + positions_PD[kept_BK]
        class_B1D = (self.class_embedding + self.position_embedding[0]).expand(len(x_BPD), 1, -1)
        x_BLD = self.ln_pre(torch.cat([class_B1D.to(x_BPD.dtype), x_BPD], dim=1))
        class_token_B = torch.zeros(len(x_BLD), dtype=torch.long, device=x_BLD.device)
        return self.ln_post(self.transformer(x_BLD, class_token_B)) @ self.projection

    def _cut(self, pixels_BCSS: Tensor) -> Tensor:
        """Pictures as rows of flattened patches; with the product that follows this is the patch convolution."""
        batch, channels, side, _ = pixels_BCSS.shape
        grid = side // self.patch
        cut = pixels_BCSS.reshape(batch, channels, grid, self.patch, grid, self.patch)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, grid * grid, channels * self.patch**2)


class TextTower(nn.Module):
    """A causal transformer pooled at the end token."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        width = shape.text_width
        self.token_embedding = nn.Embedding(shape.vocabulary, width)
        self.position_embedding = nn.Parameter(torch.empty(shape.context, width))
        self.transformer = Transformer(width, shape.text_layers, shape.text_heads, causal=True)
        self.ln_final = nn.LayerNorm(width)
        self.projection = nn.Parameter(torch.empty(width, shape.embedding))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Embeddings before normalisation. What follows the end token cannot reach it, so captions may be trimmed."""
        x_BLD = self.token_embedding(tokens_BL) + self.position_embedding[: tokens_BL.shape[1]]
        end_B = tokens_BL.argmax(dim=-1)  # the end symbol has the highest id
        return self.ln_final(self.transformer(x_BLD, end_B)) @ self.projection

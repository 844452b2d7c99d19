"""SigLIP's towers (Zhai et al. 2023, arXiv 2303.15343; SigLIP 2: arXiv 2502.14786), where they differ from CLIP's.

Images have no class token: one learnt query looks at all patches after the last block (a head of multi-head attention
pooling, MAP). Captions are read both ways and pooled at their last token, padding or not: the towers learnt to look at
their padding, so that a caption always has its full length and is never trimmed.

Shapes: B batch, C colour channels, S image side, P patches, K patches seen, L tokens, D width, E embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapclip.config import ModelConfig
from lapclip.model.block import ACTIVATIONS, Attention, LayerNorm, Linear, Transformer
from lapclip.model.kernels import linear
from lapclip.model.towers import ImageTower, TextTower, resampling

EPSILON = 1e-6
"""Of all norms; CLIP's have 1e-5."""


class PoolingHead(nn.Module):
    """One learnt query looks at all tokens; an MLP is added to what it sees."""

    def __init__(self, width: int, heads: int, *, hidden: int, activation: str) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(width))
        self.attention = Attention(width, heads, causal=False)
        self.ln = LayerNorm(width, eps=EPSILON)
        self.mlp_in = Linear(width, hidden)
        self.mlp_out = Linear(hidden, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_BLD: Tensor) -> Tensor:
        probe_BD = self.probe.to(x_BLD.dtype).expand(x_BLD.shape[0], -1)
        seen_BD = self.attention.one_query(x_BLD, probe_BD, None, None)
        return self.mlp_out(self.activation(self.mlp_in(self.ln(seen_BD))), seen_BD)

    def initialise(self, generator: torch.Generator) -> None:
        width = self.probe.numel()
        nn.init.normal_(self.probe, 0.0, width**-0.5, generator=generator)
        for layer in (self.attention.qkv, self.attention.out, self.mlp_in, self.mlp_out):
            nn.init.normal_(layer.weight, 0.0, layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)


class SiglipImageTower(ImageTower):
    """A vision transformer without a class token: after the last block are all tokens, which the head pools.

    The embedding is as wide as the tower. Where patches do not divide the image, its right and lower edge are not seen.
    """

    def __init__(self, shape: ModelConfig) -> None:
        nn.Module.__init__(self)
        width, self.patch = shape.image_width, shape.patch
        self.patches = (shape.image_size // shape.patch) ** 2
        self.patch_weight = nn.Parameter(torch.empty(width, 3, self.patch, self.patch))
        self.patch_bias = nn.Parameter(torch.empty(width))
        self.position_embedding = nn.Parameter(torch.empty(self.patches, width))
        sizes = {"hidden": shape.image_hidden, "activation": shape.activation}
        self.transformer = Transformer(
            width, shape.image_layers, shape.image_heads, causal=False, epsilon=EPSILON, **sizes
        )
        self.ln_post = LayerNorm(width, eps=EPSILON)
        self.head = PoolingHead(width, shape.image_heads, **sizes)

    def begin(self, pixels_BCSS: Tensor, block: int, patches_BK: Tensor | None = None) -> Tensor:
        grid = pixels_BCSS.shape[-1] // self.patch
        seen = grid * self.patch
        patches_BPD, positions_PD = self._cut(pixels_BCSS[..., :seen, :seen], grid), self._positions(grid)
        if patches_BK is not None:
            patches_BPD, positions_PD = self._chosen(patches_BPD, positions_PD, patches_BK)
        weight_DI = self.patch_weight.flatten(1)
        embedded_BPD = linear(patches_BPD.to(self._dtype), weight_DI, self.patch_bias, self.compute.linear)
        x_BPD = embedded_BPD.to(positions_PD.dtype) + positions_PD
        return self.transformer(x_BPD.to(self._dtype), None, stop=block)

    def finish(self, features: Tensor, block: int) -> Tensor:
        return self.head(self.ln_post(self.transformer(features.to(self._dtype), None, first=block)))

    def initialise_ends(self, generator: torch.Generator) -> None:
        """Values to start with: those of CLIP where it has such a part, and of the same size where it has not."""
        nn.init.normal_(self.patch_weight, 0.0, (3 * self.patch**2) ** -0.5, generator=generator)
        nn.init.zeros_(self.patch_bias)
        nn.init.normal_(self.position_embedding, 0.0, len(self.patch_bias) ** -0.5, generator=generator)
        self.head.initialise(generator)

    def _positions(self, grid: int) -> Tensor:
        own = self.position_embedding
        if grid * grid == self.patches:
            return own
        return resampling(round(self.patches**0.5), grid, own.device).to(own.dtype) @ own


class SiglipTextTower(TextTower):
    """A transformer that reads both ways, pooled at the last token of its full length."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__(shape, causal=False, epsilon=EPSILON)
        self.projection_bias = nn.Parameter(torch.empty(shape.embedding))

    def begin(self, tokens_BL: Tensor, block: int) -> Tensor:
        length, context = tokens_BL.shape[1], self.position_embedding.shape[0]
        assert length == context, f"a caption has {length} tokens and needs all {context}"
        return super().begin(tokens_BL, block)

    def initialise_ends(self, generator: torch.Generator) -> None:
        super().initialise_ends(generator)
        nn.init.zeros_(self.projection_bias)

    def _ends(self, tokens_BL: Tensor) -> Tensor:
        return torch.full_like(tokens_BL[:, 0], tokens_BL.shape[1] - 1)

    def _project(self, pooled_BD: Tensor) -> Tensor:
        return linear(pooled_BD, self.projection.T, self.projection_bias, self.compute.linear)

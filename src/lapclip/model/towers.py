"""The image tower and the text tower of CLIP, and those of SigLIP where they differ.

A tower can be run in two parts, so that what does not learn is computed once: `begin` gives what enters one of its
blocks, `finish` goes on from there. After the last block that is the pooled token, (B, D), else all tokens, (B, L, D).

SigLIP (Zhai et al. 2023, arXiv 2303.15343; SigLIP 2: arXiv 2502.14786): images have no class token: one learnt query
looks at all patches after the last block (a head of multi-head attention pooling, MAP). Captions are read both ways and
pooled at their last token, padding or not: the towers learnt to look at their padding, so that a caption always has its
full length and is never trimmed.

Shapes: B batch, C colour channels, S image side, P patches, L tokens, D width, E embedding.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.config import ModelConfig
from lapclip.model.block import ACTIVATIONS, Attention, LayerNorm, Linear, Transformer
from lapclip.model.kernels import Compute, linear

SIGLIP_EPSILON = 1e-6
"""Of all norms of SigLIP; CLIP's have 1e-5."""


class ImageTower(nn.Module):
    """A vision transformer: patches and a class token in, the class token projected out."""

    compute = Compute()

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        width, self.patch = shape.image_width, shape.patch
        self.patches = (shape.image_size // shape.patch) ** 2
        self.patch_weight = nn.Parameter(torch.empty(width, 3, self.patch, self.patch))
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.position_embedding = nn.Parameter(torch.empty(1 + self.patches, width))
        self.ln_pre = LayerNorm(width)
        self.transformer = Transformer(
            width,
            shape.image_layers,
            shape.image_heads,
            causal=False,
            hidden=shape.image_hidden,
            activation=shape.activation,
        )
        self.ln_post = LayerNorm(width)
        self.projection = nn.Parameter(torch.empty(width, shape.embedding))

    def forward(self, pixels_BCSS: Tensor) -> Tensor:
        """Return embeddings before normalization.

        Images may be smaller than the model's: the positions of their patches are interpolated.
        """
        return self.finish(self.begin(pixels_BCSS, 0), 0)

    @property
    def depth(self) -> int:
        return len(self.transformer.blocks)

    def begin(self, pixels_BCSS: Tensor, block: int) -> Tensor:
        """What enters a block, counted from 0."""
        grid = pixels_BCSS.shape[-1] // self.patch
        patches_BPD, positions_PD = self._cut(pixels_BCSS, grid), self._positions(grid)
        embedded_BPD = self._linear(patches_BPD.to(self._dtype), self.patch_weight.flatten(1))
        x_BPD = (
            embedded_BPD.to(positions_PD.dtype) + positions_PD
        )  # not every device adds two precisions
        class_B1D = (self.class_embedding + self.position_embedding[0]).expand(
            x_BPD.shape[0], 1, -1
        )
        x_BLD = self.ln_pre(torch.cat([class_B1D, x_BPD], dim=1)).to(self._dtype)
        return self.transformer(x_BLD, self._class_token(x_BLD), stop=block)

    def finish(self, features: Tensor, block: int) -> Tensor:
        """Embeddings before normalisation, from what enters a block."""
        x_BD = self.transformer(features.to(self._dtype), self._class_token(features), first=block)
        return self._linear(self.ln_post(x_BD), self.projection.T)

    def initialise_ends(self, generator: torch.Generator) -> None:
        """CLIP's initial values of what comes before and after the blocks."""
        std = self.class_embedding.numel() ** -0.5
        nn.init.normal_(self.patch_weight, 0.0, (3 * self.patch**2) ** -0.5, generator=generator)
        for tensor in (self.class_embedding, self.position_embedding, self.projection):
            nn.init.normal_(tensor, 0.0, std, generator=generator)

    def initialise_blocks(self, generator: torch.Generator) -> None:
        """CLIP's initial values of the blocks."""
        self.transformer.initialise(generator)

    @staticmethod
    def _class_token(x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)

    @property
    def _dtype(self) -> torch.dtype:
        return self.compute.dtype or self.patch_weight.dtype

    def _linear(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        return linear(x, weight_OI, None, self.compute.linear)

    def _positions(self, grid: int) -> Tensor:
        """The position embeddings of a grid of patches, (P, D)."""
        own = self.position_embedding[-self.patches :]  # a class token comes before the patches
        if grid * grid == self.patches:
            return own
        return resampling(round(self.patches**0.5), grid, own.device).to(own.dtype) @ own

    def _cut(self, pixels_BCSS: Tensor, grid: int) -> Tensor:
        """Images as rows of flattened patches; with the product that follows this is the patch convolution."""
        batch, channels = pixels_BCSS.shape[:2]
        cut = pixels_BCSS.reshape(batch, channels, grid, self.patch, grid, self.patch)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, grid * grid, channels * self.patch**2)


class TextTower(nn.Module):
    """A causal transformer pooled at the end token."""

    compute = Compute()

    def __init__(self, shape: ModelConfig, *, causal: bool = True, epsilon: float = 1e-5) -> None:
        super().__init__()
        width = shape.text_width
        # Without torch's first values: `initialise` draws them, and where a model is loaded nobody needs any.
        self.token_embedding = nn.Embedding.from_pretrained(
            torch.empty(shape.vocabulary, width), freeze=False
        )
        self.position_embedding = nn.Parameter(torch.empty(shape.context, width))
        self.transformer = Transformer(
            width,
            shape.text_layers,
            shape.text_heads,
            causal=causal,
            hidden=shape.text_hidden,
            activation=shape.text_activation or shape.activation,
            epsilon=epsilon,
        )
        self.ln_final = LayerNorm(width, eps=epsilon)
        self.projection = nn.Parameter(torch.empty(width, shape.embedding))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Embeddings before normalisation. What follows the end token cannot reach it, so captions may be trimmed."""
        return self.finish(self.begin(tokens_BL, 0), tokens_BL, 0)

    @property
    def depth(self) -> int:
        return len(self.transformer.blocks)

    def begin(self, tokens_BL: Tensor, block: int) -> Tensor:
        """What enters a block, counted from 0."""
        x_BLD = self.token_embedding(tokens_BL) + self.position_embedding[: tokens_BL.shape[1]]
        return self.transformer(
            x_BLD.to(self.compute.dtype or x_BLD.dtype), self._ends(tokens_BL), stop=block
        )

    def finish(self, features: Tensor, tokens_BL: Tensor, block: int) -> Tensor:
        """Embeddings before normalisation, from what enters a block."""
        features = features.to(self.compute.dtype or features.dtype)
        pooled_BD = self.ln_final(self.transformer(features, self._ends(tokens_BL), first=block))
        return self._project(pooled_BD)

    def initialise_ends(self, generator: torch.Generator) -> None:
        """CLIP's initial values of what comes before and after the blocks."""
        nn.init.normal_(self.token_embedding.weight, 0.0, 0.02, generator=generator)
        nn.init.normal_(self.position_embedding, 0.0, 0.01, generator=generator)
        nn.init.normal_(self.projection, 0.0, self.projection.shape[0] ** -0.5, generator=generator)

    def initialise_blocks(self, generator: torch.Generator) -> None:
        """CLIP's initial values of the blocks."""
        self.transformer.initialise(generator)

    def _ends(self, tokens_BL: Tensor) -> Tensor:
        """Where the end token stands, which has the highest id."""
        return tokens_BL.argmax(dim=-1)

    def _project(self, pooled_BD: Tensor) -> Tensor:
        return linear(pooled_BD, self.projection.T, None, self.compute.linear)


@cache
def resampling(grid: int, smaller: int, device: torch.device) -> Tensor:
    """The matrix that takes values on a square grid to a smaller one, (smaller^2, grid^2).

    Kept on the device: a recorded step must not fetch it from elsewhere.
    """
    with torch.inference_mode(False):  # training may use what an evaluation made
        units = torch.eye(grid * grid, dtype=torch.float32, device="cpu").view(
            grid * grid, 1, grid, grid
        )
        small = F.interpolate(units, (smaller, smaller), mode="bicubic", antialias=True)
        return small.flatten(1).T.contiguous().to(device)


class PoolingHead(nn.Module):
    """One learnt query looks at all tokens; an MLP is added to what it sees."""

    def __init__(self, width: int, heads: int, *, hidden: int, activation: str) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(width))
        self.attention = Attention(width, heads, causal=False)
        self.ln = LayerNorm(width, eps=SIGLIP_EPSILON)
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
            width,
            shape.image_layers,
            shape.image_heads,
            causal=False,
            epsilon=SIGLIP_EPSILON,
            **sizes,
        )
        self.ln_post = LayerNorm(width, eps=SIGLIP_EPSILON)
        self.head = PoolingHead(width, shape.image_heads, **sizes)

    def begin(self, pixels_BCSS: Tensor, block: int) -> Tensor:
        grid = pixels_BCSS.shape[-1] // self.patch
        seen = grid * self.patch
        patches_BPD, positions_PD = (
            self._cut(pixels_BCSS[..., :seen, :seen], grid),
            self._positions(grid),
        )
        weight_DI = self.patch_weight.flatten(1)
        embedded_BPD = linear(
            patches_BPD.to(self._dtype), weight_DI, self.patch_bias, self.compute.linear
        )
        x_BPD = embedded_BPD.to(positions_PD.dtype) + positions_PD
        return self.transformer(x_BPD.to(self._dtype), None, stop=block)

    def finish(self, features: Tensor, block: int) -> Tensor:
        return self.head(
            self.ln_post(self.transformer(features.to(self._dtype), None, first=block))
        )

    def initialise_ends(self, generator: torch.Generator) -> None:
        """Values to start with: those of CLIP where it has such a part, and of the same size where it has not."""
        nn.init.normal_(self.patch_weight, 0.0, (3 * self.patch**2) ** -0.5, generator=generator)
        nn.init.zeros_(self.patch_bias)
        nn.init.normal_(
            self.position_embedding, 0.0, len(self.patch_bias) ** -0.5, generator=generator
        )
        self.head.initialise(generator)


class SiglipTextTower(TextTower):
    """A transformer that reads both ways, pooled at the last token of its full length."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__(shape, causal=False, epsilon=SIGLIP_EPSILON)
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

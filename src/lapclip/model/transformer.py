"""One pre-norm transformer block, as in CLIP, and the stack of them.

Shapes: B batch, L tokens, D width, H heads. A mask is boolean, True where a query may look at a key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.machine.devices import ready_for_attention


class Attention(nn.Module):
    """Multi-head attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (self._split(part) for part in self.qkv(x_BLD).chunk(3, dim=-1))
        return self.out(self._merge(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)))

    def one_query(self, x_BLD: Tensor, query_BD: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of a single token per sequence over all tokens; the mask is (B, 1, 1, L)."""
        width = x_BLD.shape[-1]
        query_weight, rest_weight = self.qkv.weight.split([width, 2 * width])
        query_bias, rest_bias = self.qkv.bias.split([width, 2 * width])
        query = self._split(F.linear(query_BD, query_weight, query_bias).unsqueeze(1))
        key, value = (self._split(part) for part in F.linear(x_BLD, rest_weight, rest_bias).chunk(2, dim=-1))
        return self.out(self._merge(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))).squeeze(1)

    def _split(self, x_BLD: Tensor) -> Tensor:
        return ready_for_attention(x_BLD.unflatten(-1, (self.heads, -1)).transpose(1, 2))

    def _merge(self, x_BHLD: Tensor) -> Tensor:
        return x_BHLD.transpose(1, 2).flatten(-2)


class Block(nn.Module):
    """Attention and MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.ln_1(x_BLD), mask)
        return x_BLD + self._mlp(self.ln_2(x_BLD))

    def initialise(self, depth: int, generator: torch.Generator) -> None:
        """CLIP's initial values: what is added to the residual stream shrinks with the depth of the stack."""
        width = self.attention.out.in_features
        branch_std = width**-0.5 * (2 * depth) ** -0.5
        for linear, std in (
            (self.attention.qkv, width**-0.5),
            (self.attention.out, branch_std),
            (self.mlp_in, (2 * width) ** -0.5),
            (self.mlp_out, branch_std),
        ):
            nn.init.normal_(linear.weight, 0.0, std, generator=generator)
            nn.init.zeros_(linear.bias)

    def pooled(self, x_BLD: Tensor, token_B: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `forward` gives at one token of each sequence, computed for that token alone."""
        rows_B = torch.arange(len(x_BLD), device=x_BLD.device)
        normed_BLD = self.ln_1(x_BLD)
        x_BD = x_BLD[rows_B, token_B] + self.attention.one_query(normed_BLD, normed_BLD[rows_B, token_B], mask)
        return x_BD + self._mlp(self.ln_2(x_BD))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(x)))


class Transformer(nn.Module):
    """A stack of blocks that ends at one token of each sequence."""

    def __init__(self, width: int, layers: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def layers(self) -> list[Block]:
        """The blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def initialise(self, generator: torch.Generator) -> None:
        """CLIP's initial values for every block."""
        for block in self.layers():
            block.initialise(len(self.blocks), generator)

    def forward(self, x_BLD: Tensor, token_B: Tensor) -> Tensor:
        """The last block runs for the pooled token only: nothing else leaves the tower, so nothing else is needed."""
        length = x_BLD.shape[1]
        mask_LL = last_mask = None
        if self.causal:
            position_L = torch.arange(length, device=x_BLD.device)
            mask_LL = position_L[:, None] >= position_L[None, :]
            # With one query row `is_causal` would see key 0 only, so the row's own mask is given.
            last_mask = (position_L[None, :] <= token_B[:, None])[:, None, None, :]
        *first, last = self.layers()
        for block in first:
            x_BLD = block(x_BLD, mask_LL)
        return last.pooled(x_BLD, token_B, last_mask)

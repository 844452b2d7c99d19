"""One pre-norm transformer block, as in CLIP, and the stack of them.

Shapes: B batch, L tokens, D width, H heads. A mask is boolean, True where the query may look at a key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lapclip.machine.choose_device import trusts_one_query_without_keys
from lapclip.model.kernels import (
    Compute,
    attention,
    is_exported,
    layer_norm,
    linear,
    merge_heads,
    mlp,
    one_query_attention,
    projected_attention,
    residual_norm,
    split_heads,
)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), as OpenAI's CLIP has it."""
    return (
        F.silu(1.702 * x) / 1.702
    )  # the same, but the backward pass keeps one tensor instead of two


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by the approximation with a hyperbolic tangent, as SigLIP has it."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"gelu": F.gelu, "quick_gelu": quick_gelu, "gelu_tanh": gelu_tanh}


class Linear(nn.Linear):
    """A linear layer that takes the precision of its input."""

    compute = Compute()

    def forward(
        self, input: Tensor, added: Tensor | None = None, *, takes_bias_gradient: bool = True
    ) -> Tensor:
        """What is to be added to the result, if anything, is added on the way. The gradient of the bias may be taken
        elsewhere."""
        bias_O = self.bias if takes_bias_gradient else self.bias.detach()
        return linear(input, self.weight, bias_O, self.compute.linear, added)

    def rows(self, x: Tensor, first: int, last: int) -> Tensor:
        """Some of the outputs alone."""
        return linear(x, self.weight[first:last], self.bias[first:last], self.compute.linear)


class LayerNorm(nn.LayerNorm):
    """A norm that takes the precision of its input."""

    compute = Compute()

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)

    def with_residual(self, x_BLD: Tensor, last: nn.Module) -> tuple[Tensor, Tensor, bool]:
        """The norm of x, which enters a branch; x, the residual that the branch is added to; and whether the last layer
        of the branch takes the gradient of its bias."""
        bias_D = last.bias if isinstance(last, Linear) else None
        return residual_norm(x_BLD, self.weight, self.bias, self.eps, bias_D, self.compute.linear)


class Attention(nn.Module):
    """Multi-head attention with one fused projection for queries, keys and values."""

    compute = Compute()

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def forward(
        self, x_BLD: Tensor, added_BLD: Tensor, *, takes_bias_gradient: bool = True
    ) -> Tensor:
        """What the tokens see plus the residual. The gradient of the last bias may be taken elsewhere."""
        if isinstance(self.qkv, Linear):
            layer = self.qkv
            seen_BLD = projected_attention(
                x_BLD, layer.weight, layer.bias, self.heads, self.compute, causal=self.causal
            )
        else:  # with an addition of low rank
            seen_BLD = attention(
                self.qkv(x_BLD), self.heads, self.compute.attention, causal=self.causal
            )
        return self.out(seen_BLD, added_BLD, takes_bias_gradient=takes_bias_gradient)

    def one_query(
        self, x_BLD: Tensor, query_BD: Tensor, added_BD: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Attention of a single token per sequence over all tokens; the mask is (B, 1, 1, L)."""
        width = x_BLD.shape[-1]
        query_BD = self.qkv.rows(query_BD, 0, width)
        # Additions of low rank have no weight to go through, and exports keep the layers that int8 rounds.
        if (
            isinstance(self.qkv, Linear)
            and not is_exported()
            and trusts_one_query_without_keys(x_BLD.device)
        ):
            weight, bias = self.qkv.weight[width:], self.qkv.bias[2 * width :]
            return self.out(
                one_query_attention(x_BLD, query_BD, weight, bias, self.heads, mask), added_BD
            )
        query = query_BD.unsqueeze(1)
        key, value = self.qkv.rows(x_BLD, width, 3 * width).chunk(2, dim=-1)
        query, key, value = (split_heads(part, self.heads) for part in (query, key, value))
        seen_B1D = merge_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        return self.out(seen_B1D.squeeze(1), added_BD)


class Block(nn.Module):
    """Attention and MLP, each added to its input. The MLP is `hidden` wide inside, or four times as wide as outside."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        hidden: int | None = None,
        activation: str = "gelu",
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.ln_1 = LayerNorm(width, eps=epsilon)
        self.attention = Attention(width, heads, causal=causal)
        self.ln_2 = LayerNorm(width, eps=epsilon)
        self.mlp_in = Linear(width, hidden)
        self.mlp_out = Linear(hidden, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_BLD: Tensor) -> Tensor:
        normed_BLD, x_BLD, takes_bias_gradient = self.ln_1.with_residual(x_BLD, self.attention.out)
        x_BLD = self.attention(normed_BLD, x_BLD, takes_bias_gradient=takes_bias_gradient)
        normed_BLD, x_BLD, takes_bias_gradient = self.ln_2.with_residual(x_BLD, self.mlp_out)
        return self._mlp(normed_BLD, x_BLD, takes_bias_gradient=takes_bias_gradient)

    def initialise(self, depth: int, generator: torch.Generator) -> None:
        """CLIP's initial values: what is added to the residual stream shrinks with the depth of the stack."""
        width = self.attention.out.in_features
        branch_std = width**-0.5 * (2 * depth) ** -0.5
        for layer, std in (
            (self.attention.qkv, width**-0.5),
            (self.attention.out, branch_std),
            (self.mlp_in, (2 * width) ** -0.5),
            (self.mlp_out, branch_std),
        ):
            nn.init.normal_(layer.weight, 0.0, std, generator=generator)
            nn.init.zeros_(layer.bias)

    def pooled(self, x_BLD: Tensor, token_B: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `forward` gives at one token of each sequence, computed for that token alone."""
        rows_B = torch.arange(
            x_BLD.shape[0], device=x_BLD.device
        )  # `len` would fix the batch of an exported graph
        normed_BLD = self.ln_1(x_BLD)
        x_BD = self.attention.one_query(
            normed_BLD, normed_BLD[rows_B, token_B], x_BLD[rows_B, token_B], mask
        )
        return self._mlp(self.ln_2(x_BD), x_BD)

    def _mlp(self, x: Tensor, added: Tensor, *, takes_bias_gradient: bool = True) -> Tensor:
        """The MLP's result plus the residual. The gradient of the last bias may be taken elsewhere."""
        layer, last = self.mlp_in, self.mlp_out
        if self.activation is not F.gelu:
            return last(self.activation(layer(x)), added, takes_bias_gradient=takes_bias_gradient)
        bias_O = last.bias if takes_bias_gradient else last.bias.detach()
        return mlp(x, layer.weight, layer.bias, last.weight, bias_O, added, layer.compute.linear)


class Transformer(nn.Module):
    """A stack of blocks that ends at one token of each sequence, or at all of them."""

    compute = Compute()

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        *,
        causal: bool,
        hidden: int,
        activation: str,
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.blocks = nn.ModuleList(
            Block(
                width, heads, causal=causal, hidden=hidden, activation=activation, epsilon=epsilon
            )
            for _ in range(layers)
        )

    def layers(self) -> list[Block]:
        """The blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def initialise(self, generator: torch.Generator) -> None:
        """CLIP's initial values for every block."""
        for block in self.layers():
            block.initialise(len(self.blocks), generator)

    def forward(
        self, x: Tensor, token_B: Tensor | None, first: int = 0, stop: int | None = None
    ) -> Tensor:
        """The blocks from `first` on, up to before `stop`.

        The last block of all runs for the pooled token only: nothing else leaves the tower, so nothing else is needed.
        Without a token to pool it is as the others are.
        """
        *earlier, last = self.layers()
        if token_B is None:
            earlier.append(last)
        for block in earlier[first:stop]:
            if self.compute.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportAssignmentType]
            else:
                x = block(x)
        if token_B is None or first > len(earlier) or (stop is not None and stop <= len(earlier)):
            return x
        visible = None
        if self.causal:
            # With one query row `is_causal` would see key 0 only, so the row's own mask is given.
            position_L = torch.arange(x.shape[1], device=x.device)
            visible = (position_L[None, :] <= token_B[:, None])[:, None, None, :]
        return last.pooled(x, token_B, visible)

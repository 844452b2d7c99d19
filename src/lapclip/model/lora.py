"""Low-rank additions to linear layers (Hu et al. 2021, arXiv 2106.09685): few numbers learn, and in the end they are
added to the weights, so that a plain model remains.

A fused projection for queries, keys and values gets one addition for each of the three. Shapes: R rank, P parts of the
outputs, I inputs, O outputs of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapclip.model.block import Attention, Linear
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute

DOWN, UP = "lora_down", "lora_up"


class LowRank(nn.Module):
    """A linear layer with an addition of low rank. It starts at zero, so nothing changes before the first update."""

    compute = Compute()

    def __init__(self, base: nn.Linear, rank: int, parts: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.parts = base, parts
        self.lora_down = nn.Parameter(torch.empty(parts, rank, base.in_features))
        self.lora_up = nn.Parameter(torch.zeros(parts, base.out_features // parts, rank))
        nn.init.normal_(self.lora_down, 0.0, base.in_features**-0.5, generator=generator)

    @property
    def in_features(self) -> int:
        return self.base.in_features

    def forward(self, input: Tensor, added: Tensor | None = None) -> Tensor:
        """As the layer itself, with the addition."""
        y = self.base(input) if added is None else self.base(input, added)
        return y + self._addition(input, 0, self.parts).to(y.dtype)

    def rows(self, x: Tensor, first: int, last: int) -> Tensor:
        """Some of the outputs alone, whole parts of them."""
        assert isinstance(self.base, Linear)
        size = self.base.out_features // self.parts
        return self.base.rows(x, first, last) + self._addition(x, first // size, last // size).to(x.dtype)

    def change(self) -> Tensor:
        """What the addition amounts to, as a weight of the layer, (P O, I)."""
        return (self.lora_up @ self.lora_down).flatten(0, 1)

    def _addition(self, x: Tensor, first: int, stop: int) -> Tensor:
        down_PRI, up_POR = self.lora_down[first:stop].to(x.dtype), self.lora_up[first:stop].to(x.dtype)
        inner = (x @ down_PRI.flatten(0, 1).T).unflatten(-1, (stop - first, -1))
        return torch.einsum("...pr,por->...po", inner, up_POR).flatten(-2)


def add_lora(model: CLIP, learning: set[int], rank: int, seed: int) -> list[str]:
    """Give the linear layers of attention an addition, where their weights would learn; says which layers."""
    generator = torch.Generator().manual_seed(seed)
    named = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = []
    for name, module in named.items():
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        if id(module.weight) not in learning or not _in_attention(name, owner):
            continue
        fused = "qkv" in last and module.out_features == 3 * module.in_features
        setattr(owner, last, LowRank(module, rank, 3 if fused else 1, generator).to(module.weight.device))
        found.append(name)
    return found


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain model that the additions amount to."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith((DOWN, UP))}
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            weight = state.pop(f"{name}.base.weight")
            state[f"{name}.weight"] = weight + module.change().detach().to(weight.dtype)
            if f"{name}.base.bias" in state:
                state[f"{name}.bias"] = state.pop(f"{name}.base.bias")
    return state


def _in_attention(name: str, owner: nn.Module) -> bool:
    """Whether a layer belongs to attention: ours by its class, foreign ones by what such modules are called."""
    if isinstance(owner, nn.MultiheadAttention):  # it takes the weights out of its layers and never calls them
        return False
    return isinstance(owner, Attention) or "attention" in name.lower() or ".attn." in name or "_attn." in name

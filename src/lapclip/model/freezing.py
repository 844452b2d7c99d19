"""What of a model is trainable: all of it, the last blocks of its towers, additions of low rank, or the heads alone.

The part of a model that a parameter belongs to is image.embedding, image.0 to image.head, the same for text, and,
outside both towers, temperature, bias and what objectives add. Gradients are shown by part, learning rates fall from the head down,
and parts are frozen.

Low-rank additions to linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685): few numbers learn, and in the end they are
added to the weights, so that a plain model remains. A fused projection for queries, keys and values gets one addition
for each of the three. Shapes: R rank, P parts of the outputs, I inputs, O outputs of a part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lapclip.config import ALL, TrainConfig
from lapclip.model.block import Attention, Linear
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.seeding import derived_seed

EMBEDDING, HEAD = "embedding", "head"
OUTSIDE = {"logit_scale": "temperature", "logit_bias": "bias"}
OF_HEAD = ("ln_post", "ln_final", "projection", "head.")


def parts_of(model: CLIP) -> dict[str, str]:
    """The part of each parameter, by its name."""
    # An addition of low rank belongs where its layer does.
    found = {
        name: part_of(name.removesuffix(DOWN).removesuffix(UP))
        for name, _ in model.named_parameters()
    }
    for tower in ("image", "text"):
        module = getattr(model, tower)
        if not isinstance(module, PretrainedTower):
            continue
        # Names in foreign networks say little: what was seen while it ran says more.
        blocks = module.blocks_found.block_of_parameters()
        named = dict(model.named_parameters())
        for name in found:
            if name.startswith(f"{tower}.backbone."):
                base = (
                    name
                    if not name.endswith((DOWN, UP))
                    else f"{name.rpartition('.')[0]}.base.weight"
                )
                block = blocks.get(id(named[base]), 0)
                found[name] = f"{tower}.{EMBEDDING if block == 0 else block - 1}"
    return found


def part_of(name: str) -> str:
    """The part of a parameter of our own towers."""
    tower, _, rest = name.partition(".")
    if not rest:
        return OUTSIDE.get(name, name)
    if "blocks." in rest:
        return f"{tower}.{rest.partition('blocks.')[2].split('.')[0]}"
    return f"{tower}.{HEAD if rest.startswith(OF_HEAD) else EMBEDDING}"


def depth_of(part: str, depth: int) -> int:
    """How far a part is below its tower's head: 0 for the head, 1 for the last block, depth + 1 for the embedding."""
    _, _, block = part.partition(".")
    if block == EMBEDDING:
        return depth + 1
    return 0 if block in (HEAD, "") else depth - int(block)


def freeze(model: CLIP, config: TrainConfig) -> None:
    """Freeze what does not learn, and add what learns instead of whole weights."""
    parts = parts_of(model)
    blocks = {"image": config.image_blocks, "text": config.text_blocks}
    chosen = []
    for name, parameter in model.named_parameters():
        tower, _, part = parts[name].partition(".")
        if part in ("", HEAD):  # what lies outside both towers, and heads, always learn
            continue
        first = (
            max(0, getattr(model, tower).depth - int(blocks[tower])) if blocks[tower] != ALL else 0
        )
        learns = blocks[tower] == ALL or (part != EMBEDDING and int(part) >= first)
        parameter.requires_grad_(parameter.requires_grad and learns)
        chosen += [parameter] if parameter.requires_grad else []
    if config.lora_rank:
        for parameter in chosen:
            parameter.requires_grad_(False)
        add_lora(
            model,
            {id(parameter) for parameter in chosen},
            config.lora_rank,
            derived_seed(config.seed, "lora"),
        )


def boundary(model: CLIP, tower: str) -> int:
    """Return the block that features of a tower's frozen part enter: the first of which anything learns.

    Returns the depth of the tower if only its head learns, and 0 if its embedding does.
    """
    parts = parts_of(model)
    learning = [
        parts[name].partition(".")[2]
        for name in trainable_state(model)
        if name.startswith(f"{tower}.")
    ]
    module = getattr(model, tower)
    first = module.depth
    for block in learning:
        if block == EMBEDDING:
            first = 0
        elif block != HEAD:
            first = min(first, int(block))
    return module.entry(first) if isinstance(module, PretrainedTower) else first


def trainable_state(model: CLIP) -> dict[str, Tensor]:
    """What changes while training: what of a model a checkpoint keeps."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


@torch.no_grad()
def load_trainable_state(model: CLIP, state: Mapping[str, Tensor]) -> None:
    """Put back what `trainable_state` gave; all of it has to be there."""
    named = trainable_state(model)
    if named.keys() != state.keys():
        raise ValueError(
            f"it holds other tensors than the model learns: {min(named.keys() ^ state.keys())}"
        )
    for name, parameter in named.items():
        if parameter.shape != state[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)}, not {tuple(parameter.shape)}"
            )
        parameter.copy_(state[name])


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

    def forward(
        self, input: Tensor, added: Tensor | None = None, *, takes_bias_gradient: bool = True
    ) -> Tensor:
        """As the layer itself, with the addition."""
        y = (
            self.base(input)
            if added is None
            else self.base(input, added, takes_bias_gradient=takes_bias_gradient)
        )
        return y + self._addition(input, 0, self.parts).to(y.dtype)

    def rows(self, x: Tensor, first: int, last: int) -> Tensor:
        """Some of the outputs alone, whole parts of them."""
        assert isinstance(self.base, Linear)
        size = self.base.out_features // self.parts
        return self.base.rows(x, first, last) + self._addition(x, first // size, last // size).to(
            x.dtype
        )

    def change(self) -> Tensor:
        """What the addition amounts to, as a weight of the layer, (P O, I)."""
        return (self.lora_up @ self.lora_down).flatten(0, 1)

    def _addition(self, x: Tensor, first: int, stop: int) -> Tensor:
        down_PRI, up_POR = (
            self.lora_down[first:stop].to(x.dtype),
            self.lora_up[first:stop].to(x.dtype),
        )
        inner = (x @ down_PRI.flatten(0, 1).T).unflatten(-1, (stop - first, -1))
        return torch.einsum("...pr,por->...po", inner, up_POR).flatten(-2)


def add_lora(model: CLIP, learning: set[int], rank: int, seed: int) -> None:
    """Give the linear layers of attention whose weights would learn an addition."""
    generator = torch.Generator().manual_seed(seed)
    named = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    for name, module in named.items():
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        if id(module.weight) not in learning or not _in_attention(name, owner):
            continue
        fused = "qkv" in last and module.out_features == 3 * module.in_features
        addition = LowRank(module, rank, 3 if fused else 1, generator)
        setattr(owner, last, addition.to(module.weight.device))


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain model that the additions amount to, without what only training needs."""
    left_out = model.training_parameters if isinstance(model, CLIP) else []
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in left_out and not name.endswith((DOWN, UP))
    }
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            weight = state.pop(f"{name}.base.weight")
            state[f"{name}.weight"] = weight + module.change().detach().to(weight.dtype)
            if f"{name}.base.bias" in state:
                state[f"{name}.bias"] = state.pop(f"{name}.base.bias")
    return state


def _in_attention(name: str, owner: nn.Module) -> bool:
    """Whether a layer belongs to attention: ours by its class, foreign ones by what such modules are called."""
    if isinstance(
        owner, nn.MultiheadAttention
    ):  # it takes the weights out of its layers and never calls them
        return False
    return (
        isinstance(owner, Attention)
        or "attention" in name.lower()
        or ".attn." in name
        or "_attn." in name
    )

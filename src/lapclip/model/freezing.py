"""What of a model is trainable: all of it, the last blocks of its towers, additions of low rank, or the heads alone.

The part of a model that a parameter belongs to is image.embedding, image.0 to image.head, the same for text, and,
outside both towers, temperature and bias. Gradients are shown by part, learning rates fall from the head down, and
parts are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lapclip.config import ALL, TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.lora import DOWN, UP, add_lora
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.seeding import derived_seed

EMBEDDING, HEAD = "embedding", "head"
OF_LOGITS = {"logit_scale": "temperature", "logit_bias": "bias"}
OF_HEAD = ("ln_post", "ln_final", "projection", "head.")


def parts_of(model: CLIP) -> dict[str, str]:
    """The part of each parameter, by its name."""
    # An addition of low rank belongs where its layer does.
    found = {name: part_of(name.removesuffix(DOWN).removesuffix(UP)) for name, _ in model.named_parameters()}
    for tower in ("image", "text"):
        module = getattr(model, tower)
        if not isinstance(module, PretrainedTower):
            continue
        # Names in foreign networks say little: what was seen while it ran says more.
        blocks = module.blocks_found.block_of_parameters()
        named = dict(model.named_parameters())
        for name in found:
            if name.startswith(f"{tower}.backbone."):
                base = name if not name.endswith((DOWN, UP)) else f"{name.rpartition('.')[0]}.base.weight"
                block = blocks.get(id(named[base]), 0)
                found[name] = f"{tower}.{EMBEDDING if block == 0 else block - 1}"
    return found


def first_block(model: CLIP, tower: str, names: Iterable[str]) -> int:
    """The block that features of a tower enter which none of the named tensors has had a say in: the first that has one
    of them, the depth where the head alone has any, 0 where the embedding has one or where its block is not known."""
    parts = parts_of(model)
    below = [
        parts.get(name, f"{tower}.{EMBEDDING}").partition(".")[2] for name in names if name.startswith(f"{tower}.")
    ]
    module = getattr(model, tower)
    first = min((0 if block == EMBEDDING else int(block) for block in below if block != HEAD), default=module.depth)
    return module.entry(first) if isinstance(module, PretrainedTower) else first


def part_of(name: str) -> str:
    """The part of a parameter of our own towers."""
    tower, _, rest = name.partition(".")
    if not rest:
        return OF_LOGITS[name]
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
        if part in ("", HEAD):  # the scale and bias of similarities, and heads, always learn
            continue
        first = max(0, getattr(model, tower).depth - int(blocks[tower])) if blocks[tower] != ALL else 0
        learns = blocks[tower] == ALL or (part != EMBEDDING and int(part) >= first)
        parameter.requires_grad_(parameter.requires_grad and learns)
        chosen += [parameter] if parameter.requires_grad else []
    if config.lora_rank:
        for parameter in chosen:
            parameter.requires_grad_(False)
        add_lora(model, {id(parameter) for parameter in chosen}, config.lora_rank, derived_seed(config.seed, "lora"))


def boundary(model: CLIP, tower: str) -> int:
    """The block that features of a tower's frozen part enter: the first of which anything learns, its depth where none
    does, 0 where the embedding learns."""
    return first_block(model, tower, trainable_state(model))


def trainable_state(model: CLIP) -> dict[str, Tensor]:
    """What changes while training: what of a model a checkpoint keeps."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_trainable_state(model: CLIP, state: Mapping[str, Tensor]) -> None:
    """Put back what `trainable_state` gave; all of it has to be there."""
    named = trainable_state(model)
    if named.keys() != state.keys():
        raise ValueError(f"it holds other tensors than the model learns: {min(named.keys() ^ state.keys())}")
    for name, parameter in named.items():
        if parameter.shape != state[name].shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(state[name])

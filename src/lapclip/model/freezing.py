"""What of a model is trainable: all of it, the last blocks of its towers, additions of low rank, or the heads alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lapclip.config import ALL, TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.lora import add_lora
from lapclip.model.parameter_parts import EMBEDDING, HEAD, first_block, parts_of
from lapclip.seeding import derived_seed


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

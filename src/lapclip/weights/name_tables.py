"""Tables of names: which tensor of ours is which of theirs.

A table maps the beginnings of our names to the beginnings of theirs; `{n}` is the number of a block. What follows the
beginning (`.weight`, `.bias`) is the same on both sides. Weights that stand the other way round, or are three tensors
for one, are the business of the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lapclip.config import ModelConfig
from lapclip.errors import WeightsError
from lapclip.model.clip import CLIP

Tensors = Mapping[str, Tensor]

_NUMBERED = re.compile(r"\.blocks\.(\d+)\.")


def their_name(ours: str, table: Mapping[str, str]) -> str:
    """What a tensor of ours is called by them."""
    found = _NUMBERED.search(ours)
    pattern = _NUMBERED.sub(".blocks.{n}.", ours)
    for end in (pattern, pattern.rpartition(".")[0]):
        if end in table:
            return (table[end] + pattern[len(end) :]).replace("{n}", found[1] if found else "")
    raise KeyError(ours)


def expected_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a model of that shape has, and their sizes, without taking memory for them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in CLIP(shape).state_dict().items()}


def check_shapes(found: Tensors, shape: ModelConfig, names: Mapping[str, str], where: str) -> None:
    """Name the first tensor that is not as a model of that shape has it. `names` says what they call ours."""
    for ours, size in expected_shapes(shape).items():
        theirs = names.get(ours, ours)
        if ours not in found:
            raise WeightsError(
                f"{where} lacks the tensor {theirs}, which a model of its shape has, of size {size_text(size)}.",
                hint="weights and configuration of the same model",
            )
        if (actual := tuple(found[ours].shape)) != size:
            raise WeightsError(
                f"{where}: {theirs} has the size {size_text(actual)}; a model of its shape has {size_text(size)}.",
                hint="weights and configuration of the same model",
            )


def check_leftovers(left: Iterable[str], where: str) -> None:
    """Name the first tensor that has no place in our towers: then it is another architecture."""
    for name in sorted(left):
        raise WeightsError(
            f"{where} has the tensor {name}, which has no place in CLIP's transformers: it is another architecture.",
            hint="weights of a CLIP with a vision transformer, such as ViT-B-32",
        )


def size_text(size: Iterable[int]) -> str:
    return " x ".join(f"{length}" for length in size) or "one number"


def as_float32(tensor: Tensor) -> Tensor:
    """Weights are kept in float32, in memory of their own: that of a file may be unaligned or mapped."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()


def block_count(names: Iterable[str], pattern: str) -> int:
    """How many different numbers stand where the pattern has its group."""
    return len({found[1] for name in names if (found := re.match(pattern, name))})

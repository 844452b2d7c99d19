"""What the formats of published models share: the names of shapes, and tables of the names of tensors.

The sizes of shapes are those of OpenCLIP's model configurations (mlfoundations/open_clip, src/open_clip/model_configs);
the first four are OpenAI's.

A `Layout` says which tensor of ours is which of theirs, for reading and for writing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lapclip.config import ModelConfig
from lapclip.errors import WeightsError
from lapclip.model.clip import CLIP

Tensors = Mapping[str, Tensor]
SAME_MODEL = "weights and configuration of the same model"

_NUMBERED = re.compile(r"\.blocks\.(\d+)\.")
_PARTS = re.compile(r"\{(.+)\}")


class Sizes(NamedTuple):
    """What makes a shape; the vocabulary and the context are CLIP's in all of them."""

    image_size: int
    patch: int
    image_width: int
    image_layers: int
    image_heads: int
    image_hidden: int
    text_width: int
    text_layers: int
    text_heads: int
    text_hidden: int
    embedding: int


KNOWN = {
    "ViT-B-32": Sizes(224, 32, 768, 12, 12, 3072, 512, 12, 8, 2048, 512),
    "ViT-B-16": Sizes(224, 16, 768, 12, 12, 3072, 512, 12, 8, 2048, 512),
    "ViT-L-14": Sizes(224, 14, 1024, 24, 16, 4096, 768, 12, 12, 3072, 768),
    "ViT-L-14-336": Sizes(336, 14, 1024, 24, 16, 4096, 768, 12, 12, 3072, 768),
    "ViT-H-14": Sizes(224, 14, 1280, 32, 16, 5120, 1024, 24, 16, 4096, 1024),
    "ViT-g-14": Sizes(224, 14, 1408, 40, 16, 6144, 1024, 24, 16, 4096, 1024),
    "ViT-bigG-14": Sizes(224, 14, 1664, 48, 16, 8192, 1280, 32, 20, 5120, 1280),
}
SIGLIP_WIDTHS = {768: "base", 1024: "large", 1152: "so400m", 1536: "giant-opt"}
"""What the widths of SigLIP's image towers are called."""
GEMMA = 256_000
"""The tokens that SigLIP 2 knows."""
IMAGE_HEADS = {sizes.image_width: sizes.image_heads for sizes in KNOWN.values()}
TEXT_HEADS = {sizes.text_width: sizes.text_heads for sizes in KNOWN.values()}
"""Heads leave no trace in the sizes of tensors, so a file without a configuration is taken to have the usual ones."""


def name_of(shape: ModelConfig) -> str:
    """What a shape is called: its published name where it has one, else its image tower's width, blocks and patch."""
    if shape.architecture == "siglip":
        family = "siglip2" if shape.vocabulary == GEMMA else "siglip"
        size = SIGLIP_WIDTHS.get(shape.image_width, f"{shape.image_width}x{shape.image_layers}")
        return f"{family}-{size}-patch{shape.patch}-{shape.image_size}"
    sizes = Sizes(*(getattr(shape, field) for field in Sizes._fields))
    for name, known in KNOWN.items():
        if known == sizes:
            return name
    return f"vit-{shape.image_width}x{shape.image_layers}-{shape.patch}"


def named(shape: ModelConfig) -> ModelConfig:
    """With its own name, 0 for MLPs of the usual width, and colours as all these libraries read them."""
    shape = dataclasses.replace(
        shape,
        image_mlp=0 if shape.image_mlp == 4 * shape.image_width else shape.image_mlp,
        text_mlp=0 if shape.text_mlp == 4 * shape.text_width else shape.text_mlp,
        colours="stored",
    )
    return dataclasses.replace(shape, name=name_of(shape))


@dataclass(frozen=True)
class Layout:
    """Names that a library gives to our tensors, and how it stores them."""

    names: Mapping[str, str]
    """Beginnings of our names and of theirs. The ends (`.weight`, `.bias`) are the same.

    `{n}` is the number of a block. `{q|k|v}` is several tensors that are one of ours: each holds a third for each of
    its letters.
    """
    no_weights: frozenset[str] = frozenset()
    """Their tensors that hold nothing learned."""
    transposed: frozenset[str] = frozenset()
    """Our tensors that they store transposed."""
    extra_dimensions: Mapping[str, int] = field(default_factory=dict)
    """Number of leading dimensions of length 1 that they store and we do not, by our name."""

    def their_name(self, ours: str) -> str:
        """Return what a tensor of ours is called by them."""
        match = _NUMBERED.search(ours)
        pattern = _NUMBERED.sub(".blocks.{n}.", ours)
        for beginning in (pattern, pattern.rpartition(".")[0]):
            if beginning in self.names:
                theirs = self.names[beginning] + pattern[len(beginning) :]
                return theirs.replace("{n}", match[1] if match else "")
        raise KeyError(ours)

    def to_ours(self, tensors: Tensors, shape: ModelConfig, where: str) -> dict[str, Tensor]:
        """Return their tensors under our names, in float32. WeightsError names the first that does not fit."""
        check_depth(shape, tensors, where)
        found: dict[str, Tensor] = {}
        used = set(self.no_weights)
        for ours, size in expected_shapes(shape).items():
            theirs = self.their_name(ours)
            parts = [name for name, _ in _parts(theirs)]
            if not all(name in tensors for name in parts):
                raise WeightsError(
                    f"{where} lacks the tensor {theirs}, which a model of its shape has, of size {size_text(size)}.",
                    hint=SAME_MODEL,
                )
            tensor = self._load(ours, [tensors[name] for name in parts], size, where)
            if tensor.shape != size:
                raise WeightsError(
                    f"{where}: {theirs} has the size {size_text(tensor.shape)}; a model of its shape has "
                    f"{size_text(size)}.",
                    hint=SAME_MODEL,
                )
            found[ours] = tensor
            used.update(parts)
        leftovers = set(tensors) - used
        if leftovers:
            raise WeightsError(
                f"{where} has the tensor {min(leftovers)}, which has no place in CLIP's transformers: it is another "
                "architecture.",
                hint="weights of a CLIP with a vision transformer, such as ViT-B-32, or of a SigLIP",
            )
        # In memory of their own: that of a file may be unaligned or mapped.
        return {
            ours: tensor.detach().to(torch.float32, copy=True).contiguous()
            for ours, tensor in found.items()
        }

    def _load(self, ours: str, parts: list[Tensor], size: tuple[int, ...], where: str) -> Tensor:
        """Return a tensor as our towers have it."""
        tensor = parts[0]
        if len(parts) > 1:
            try:
                tensor = torch.cat(parts)
            except RuntimeError:
                raise WeightsError(f"{where}: the parts of {ours} differ in size.") from None
        while tensor.ndim > len(size) and len(tensor) == 1:
            tensor = tensor.squeeze(0)
        if ours in self.transposed:
            return tensor.T
        if ours == "image.patch_weight" and tensor.ndim == 2 and tensor.numel() == math.prod(size):
            # A Siglip2Model's: the rows of a linear layer, with colors last.
            width, colors, side, _ = size
            return tensor.reshape(width, side, side, colors).permute(0, 3, 1, 2)
        return tensor

    def to_theirs(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return our tensors under their names."""
        found: dict[str, Tensor] = {}
        for ours, tensor in tensors.items():
            if ours in self.transposed:
                tensor = tensor.T
            tensor = tensor[(None,) * self.extra_dimensions.get(ours, 0)]
            parts = list(_parts(self.their_name(ours)))
            if len(parts) == 1:
                found[parts[0][0]] = tensor.contiguous()
                continue
            rows = [len(tensor) * share // 3 for _, share in parts]
            for (name, _), piece in zip(parts, tensor.split(rows), strict=True):
                found[name] = piece.clone()
        return found


def _parts(theirs: str) -> Iterator[tuple[str, int]]:
    """Yield the names of the tensors that are one of ours, and how many thirds of it each holds."""
    match = _PARTS.search(theirs)
    if match is None:
        yield theirs, 3
        return
    for letters in match[1].split("|"):
        yield theirs.replace(match[0], letters), len(letters)


def expected_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a model of that shape has, and their sizes, without taking memory for them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in CLIP(shape).state_dict().items()}


def check_depth(shape: ModelConfig, tensors: Tensors, where: str) -> None:
    """Raise WeightsError where a shape has more blocks than there are tensors: building it would take for ever."""
    if shape.image_layers + shape.text_layers > len(tensors):
        raise WeightsError(
            f"{where} describes {shape.image_layers + shape.text_layers:,} blocks and has {len(tensors):,} tensors.",
            hint=SAME_MODEL,
        )


def size_text(size: Iterable[int]) -> str:
    return " x ".join(f"{length}" for length in size) or "one number"


def block_count(names: Iterable[str], pattern: str) -> int:
    """How many different numbers stand where the pattern has its group."""
    return len({found[1] for name in names if (found := re.match(pattern, name))})

"""What an update works on: the tensors of a batch, by micro-batches, by shards, and on their way to
a device.

Shapes: B batch, S image side, C color channels, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from lapclip.data.batches import Slicing
from lapclip.machine.device import Device
from lapclip.machine.transfer import OnItsWay

if TYPE_CHECKING:
    from lapclip.training.objectives.base import Pass

SLICING = {
    "pixels_BSSC": Slicing.OWN_ROWS,
    "image_features": Slicing.OWN_ROWS,
    "text_features": Slicing.OWN_ROWS,
    "positives_BB": Slicing.ROWS_AND_COLUMNS,
}
"""How the fixed tensors of an update are sliced, where it is not by rows."""
ALIGNED = 64
"""Bytes that the memory of a tensor is a multiple of where torch chooses it. Kernels may round
otherwise elsewhere."""


@dataclass(frozen=True)
class Inputs:
    """What an update works on. Images stay uint8 until they are on the device."""

    pixels_BSSC: Tensor
    tokens_BL: Tensor
    positives_BB: Tensor
    boxes_B5: Tensor | None
    """The box of each image that is seen (`data/pixels.py`). None for the whole image."""
    side: int
    """The side of the images that the tower sees, in pixels."""
    lengths: tuple[int, ...] = ()
    """Tokens of the longest caption in each of so many equal parts of the batch; empty takes them
    all as one."""
    shards: tuple[int, ...] = ()
    """Pairs of each shard, which follow each other; empty where the batch is one."""
    shard_lengths: tuple[tuple[int, ...], ...] = ()
    """What `lengths` says, for each shard."""
    own_shards: range | None = None
    """The shards whose rows large tensors have; None where they have all."""
    image_features: Tensor | None = None
    """Output of the frozen part of the image tower. The images are empty then."""
    text_features: Tensor | None = None
    """Output of the frozen part of the text tower for the captions."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """What objectives add, and what heads leave out of each pass."""
    slicing: Mapping[str, Slicing] = field(default_factory=dict)
    """How extras are sliced, where it is not by rows."""

    def __len__(self) -> int:
        return len(self.tokens_BL)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name."""
        fixed = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return fixed | self.extras

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """Return the same inputs with other tensors of these names."""
        fixed = {name: tensor for name, tensor in tensors.items() if name not in self.extras}
        extras = {name: tensor for name, tensor in tensors.items() if name in self.extras}
        return replace(self, **fixed, extras=self.extras | extras)

    def slicing_of(self, name: str) -> Slicing:
        """Return how a tensor is sliced."""
        return SLICING.get(name) or self.slicing.get(name, Slicing.ROWS)

    def for_pass(self, other: Pass) -> Inputs:
        """Return the same inputs with what another pass sees in the place of the images or
        captions."""
        if other.tower == "image":
            return replace(self, boxes_B5=self.extras[other.source])
        return replace(
            self,
            tokens_BL=self.extras[other.source],
            text_features=self.extras.get(other.features),
            lengths=(),
        )

    def rows(self, first: int, last: int) -> Inputs:
        """Return some of the pairs. Tensors with a column for each pair keep all columns."""
        some = {
            name: tensor[first:last]
            for name, tensor in self.tensors().items()
            if self.slicing_of(name) is not Slicing.WHOLE
        }
        return self.with_tensors(some)

    def on(self, device: Device) -> Inputs:
        """Return the same inputs with every tensor on a device."""
        moved = {name: tensor.to(device.torch) for name, tensor in self.tensors().items()}
        return self.with_tensors(moved)

    def in_order(self, rows_B: Tensor) -> Inputs:
        """Return the same pairs in another order.

        What was loaded for some shards alone is in their order already. Images that features stand
        in for are empty.
        """
        moved = {}
        for name, tensor in self.tensors().items():
            slicing = self.slicing_of(name)
            is_in_order = slicing is Slicing.OWN_ROWS and self.own_shards is not None
            if is_in_order or slicing is Slicing.WHOLE or not len(tensor):
                continue
            moved[name] = tensor[rows_B]
            if slicing is Slicing.ROWS_AND_COLUMNS:
                moved[name] = moved[name][:, rows_B]
        return self.with_tensors(moved)

    def shard(self, number: int) -> Inputs:
        """Return the pairs of one shard."""
        first, size = sum(self.shards[:number]), self.shards[number]
        loaded = range(len(self.shards)) if self.own_shards is None else self.own_shards
        assert number in loaded, "a shard that another rank computes"
        first_loaded = first - sum(self.shards[: loaded.start])
        own = {}
        for name, tensor in self.tensors().items():
            slicing = self.slicing_of(name)
            if slicing is Slicing.OWN_ROWS:
                own[name] = aligned(tensor[first_loaded : first_loaded + size])
            elif slicing is not Slicing.WHOLE:
                own[name] = tensor[first : first + size]
        alone = replace(self, shards=(), shard_lengths=(), own_shards=None)
        return replace(alone.with_tensors(own), lengths=self.shard_lengths[number])


@dataclass(frozen=True)
class Sent:
    """What an update works on, on its way to the device."""

    inputs: Inputs
    on_its_way: OnItsWay


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory begins where torch would have it begin, wherever it was cut
    from."""
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()

"""What an update works on: the tensors of a batch, by micro-batches, by ranks, and on their way to a device.

Shapes: B batch, S image side, C color channels, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lapclip.data.batches import RankRows, Slicing
from lapclip.machine.device import Device
from lapclip.machine.transfer import OnItsWay

if TYPE_CHECKING:
    from lapclip.training.objectives.base import Pass

POSITIVES = "positives_BB"
SLICING = {
    "pixels_BSSC": Slicing.OWN_ROWS,
    "image_features": Slicing.OWN_ROWS,
    "text_features": Slicing.OWN_ROWS,
    POSITIVES: Slicing.ROWS_AND_COLUMNS,
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
    """Tokens of the longest caption in each of so many equal parts of the batch; empty takes them all as one."""
    row_counts: tuple[int, ...] = ()
    """Pairs of each rank, which follow each other. Empty for a process that takes all."""
    rank: int = 0
    """This process, if there are several ranks."""
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
        """Return inputs for another pass: its crops instead of the main ones, or its texts instead of
        the captions."""
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

    def of_rank(self, ranks: RankRows, lengths: tuple[int, ...]) -> Inputs:
        """Return the pairs in the order of ranks, and which of them are this rank's.

        Tensors of own rows alone are in that order already. `lengths` are those of this rank's captions.
        """
        order = torch.from_numpy(np.concatenate(ranks.rows))
        moved = {}
        for name, tensor in self.tensors().items():
            slicing = self.slicing_of(name)
            if name == POSITIVES:
                moved[name] = tensor[:, order]
            elif slicing in (Slicing.ROWS, Slicing.ROWS_AND_COLUMNS):
                moved[name] = tensor[order]
            if slicing is Slicing.ROWS_AND_COLUMNS and name != POSITIVES:
                moved[name] = moved[name][:, order]
        ordered = self.with_tensors(moved)
        return replace(ordered, row_counts=ranks.counts, rank=ranks.rank, lengths=lengths)

    @property
    def own(self) -> slice | None:
        """The rows of this rank. None if it has all."""
        if not self.row_counts:
            return None
        first = sum(self.row_counts[: self.rank])
        return slice(first, first + self.row_counts[self.rank])

    def own_rows(self) -> Inputs:
        """Return the inputs of this rank's pairs alone, as the towers take them.

        Tensors of all pairs are cut. The others hold this rank's rows already (`Slicing.OWN_ROWS`
        and the positives) or are the same for every pair (`Slicing.WHOLE`).
        """
        if self.own is None:
            return self
        own_tensors = {}
        for name, tensor in self.tensors().items():
            slicing = self.slicing_of(name)
            if slicing is Slicing.OWN_ROWS:
                own_tensors[name] = aligned(tensor)
            elif slicing is not Slicing.WHOLE and name != POSITIVES:
                own_tensors[name] = tensor[self.own]
        all_own = self.with_tensors(own_tensors)
        return replace(all_own, row_counts=())


@dataclass(frozen=True)
class Sent:
    """What an update works on, on its way to the device."""

    inputs: Inputs
    on_its_way: OnItsWay


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory begins where torch would have it begin, wherever it was cut
    from."""
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()

"""The same numbers laid out in memory in another order: what a permuted view costs.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapclip.machine.devices import Device
from lapclip.machine.timing import in_turns
from lapclip.model.block import Block


@dataclass(frozen=True)
class LayoutTimes:
    """Milliseconds of one transformer block, forward and backward, by how its input lies in memory."""

    contiguous_ms: float
    """Batch first, as the block reads it."""
    permuted_ms: float
    """Tokens first, handed over as a view with the axes swapped."""

    @property
    def gain(self) -> float:
        """How many times as fast the contiguous one is."""
        return self.permuted_ms / self.contiguous_ms


def layout_times(device: Device, batch: int, tokens: int, width: int, heads: int, rounds: int = 7) -> LayoutTimes:
    """One block at these sizes on contiguous input against a permuted view of the same numbers."""
    block = Block(width, heads, causal=False)
    block.initialise(1, torch.Generator().manual_seed(0))
    block = block.to(device.torch)
    draw = torch.Generator().manual_seed(1)
    contiguous_BLD = torch.randn(batch, tokens, width, generator=draw).to(device.torch)
    permuted_BLD = contiguous_BLD.transpose(0, 1).contiguous().transpose(0, 1)
    assert not permuted_BLD.is_contiguous()
    assert torch.equal(permuted_BLD, contiguous_BLD)

    def run(x_BLD: Tensor) -> None:
        block.zero_grad(set_to_none=True)
        leaf_BLD = x_BLD.detach().requires_grad_()
        block(leaf_BLD).sum().backward()

    runs = {"contiguous": lambda: run(contiguous_BLD), "permuted": lambda: run(permuted_BLD)}
    times = in_turns(runs, device.synchronise, rounds)
    return LayoutTimes(1e3 * times["contiguous"], 1e3 * times["permuted"])

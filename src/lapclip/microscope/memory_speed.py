"""How fast memory is: copies within the machine's memory, to the device and within the device's, and permuted views.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapclip.machine.device import Device
from lapclip.machine.timing import in_turns
from lapclip.model.block import Block


@dataclass(frozen=True)
class CopyRates:
    """Bytes a second. A copy within one memory reads and writes each byte, and both count."""

    memory: float
    to_device: float | None
    """None where there is no other memory to copy to."""
    to_device_pinned: float | None
    """From memory that the system may not move; None where it cannot be had."""
    within_device: float | None


@dataclass(frozen=True)
class TransferTimes:
    """Seconds to bring one batch to the device."""

    plain: float
    pinned: float | None


def copy_rates(device: Device, size: int = 1 << 28, rounds: int = 5) -> CopyRates:
    """Rates of copies of `size` bytes, which should be far more than the caches hold."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {"memory": lambda: target.copy_(source)}
    if not device.is_cpu:
        far, farther = (torch.zeros(size, dtype=torch.uint8, device=device.torch) for _ in range(2))
        runs["to_device"] = lambda: far.copy_(source)
        runs["within_device"] = lambda: farther.copy_(far)
        if device.pins_memory:
            pinned = source.pin_memory()
            runs["to_device_pinned"] = lambda: far.copy_(pinned, non_blocking=True)
    seconds = in_turns(runs, device.synchronise, rounds)
    passes = {"memory": 2, "within_device": 2, "to_device": 1, "to_device_pinned": 1}
    rates = {name: passes[name] * size / seconds[name] if name in seconds else None for name in passes}
    return CopyRates(**rates)  # pyright: ignore[reportArgumentType]


def transfer_times(device: Device, batch_size: int, side: int, rounds: int = 21) -> TransferTimes:
    """The images of a batch on their way to the device."""
    images = torch.zeros(batch_size, side, side, 3, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {"plain": lambda: images.to(device.torch)}
    if device.pins_memory:
        pinned = images.pin_memory()
        runs["pinned"] = lambda: pinned.to(device.torch, non_blocking=True)
    seconds = in_turns(runs, device.synchronise, rounds)
    return TransferTimes(seconds["plain"], seconds.get("pinned"))


@dataclass(frozen=True)
class LayoutTimes:
    """Milliseconds of one transformer block, forward and backward, by how its input lies in memory."""

    contiguous_ms: float
    """Batch first, as the block reads it."""
    permuted_ms: float
    """Tokens first, handed over as a view with the axes swapped."""


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

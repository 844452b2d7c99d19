"""The way of a batch to the device: copied when it is asked for, or ahead of that, from pinned memory, while the device
computes.

Copies from memory that the system may move make the thread that asks for them wait; from pinned memory they run beside
the computation, on a stream of their own. All tensors of a batch lie in one block of memory, so that a batch is one
copy. Two such blocks take turns, and events keep the streams in order:

    pinned memory is written again    when its last copy is done: the sending thread waits for that
    device memory is written again    when what reads it is done: the copying stream waits for that, no thread does
    device memory is read             when its copy is done: the computing stream waits for that
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

ALIGNED = 256
"""Bytes that each tensor of a block begins at a multiple of, as the allocators of accelerators have it."""
SPARE = 16
"""The share of a block, one in so many, that it is made larger than needed: captions of other batches are longer."""
BLOCKS = 2
"""One is read by the device while the other is on its way."""

RECORDING = threading.Lock()
"""Held while work is recorded, and by each thread that talks to the device beside the one that computes: CUDA breaks
off a recording when another thread asks it for memory or waits for an event."""


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a batch lies in one block of memory."""

    offsets: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """Name, type, shape, and the byte at which it begins."""
    size: int
    """Bytes of all."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        offsets, at = [], 0
        for name, tensor in tensors.items():
            offsets.append((name, tensor.dtype, tuple(tensor.shape), at))
            at += -(-tensor.nbytes // ALIGNED) * ALIGNED
        return cls(tuple(offsets), at)

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors in a block of bytes."""
        return {
            name: memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, dtype, shape, first in self.offsets
        }


@dataclass(frozen=True)
class Delivered:
    """The tensors of a batch on the device."""

    tensors: dict[str, Tensor]
    memory: Tensor | None = None
    """The block in which all of them lie; None where each has memory of its own."""

    def copy(self) -> Delivered:
        """The same in memory that nobody else writes to."""
        if self.memory is None:
            return Delivered({name: tensor.clone() for name, tensor in self.tensors.items()})
        memory = self.memory.clone()
        return Delivered(Layout.of(self.tensors).tensors(memory), memory)

    def fill(self, other: Delivered) -> None:
        """Take over the numbers of another batch of the same shapes, in the order of what is sent to the device."""
        if self.memory is not None and other.memory is not None:
            self.memory.copy_(other.memory, non_blocking=True)
            return
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name], non_blocking=True)


class OnItsWay:
    """Tensors that are copied to the device when they are received."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors, self._device = dict(tensors), device

    @contextmanager
    def received(self) -> Iterator[Delivered]:
        """Inside it, what is sent to the device may read the tensors there."""
        yield Delivered({name: tensor.to(self._device) for name, tensor in self.tensors.items()})


class Transfer:
    """Sends batches to a device in the simplest way."""

    ahead: ClassVar[bool] = False
    """Whether a batch may be sent by another thread, while the device works on the one before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensors: Mapping[str, Tensor]) -> OnItsWay:
        """Start to bring tensors of the CPU to the device."""
        return OnItsWay(tensors, self._device)


class PinnedTransfer(Transfer):
    """Sends them through pinned memory, on a stream of its own. One thread may send while another receives; at most two
    batches are under way at once, the one that was received last included."""

    ahead = True

    def __init__(self, device: torch.device, module: Any) -> None:
        """`module` is torch's for this kind of device, such as `torch.cuda`."""
        super().__init__(device)
        self._module, self._index = (
            module,
            module.current_device(),
        )  # which every thread has to be told
        self._stream = module.Stream()
        self._blocks = [Block(module) for _ in range(BLOCKS)]
        self._sent = 0

    def send(self, tensors: Mapping[str, Tensor]) -> OnItsWay:
        block, layout = self._blocks[self._sent % BLOCKS], Layout.of(tensors)
        self._sent += 1
        with RECORDING, self._module.device(self._index):
            block.copied.synchronize()
            pinned = block.pinned_memory(layout.size)
        for name, target in layout.tensors(pinned).items():
            np.copyto(
                target.numpy(), tensors[name].numpy()
            )  # torch would start threads of its own in this one
        with RECORDING, self._module.device(self._index), self._module.stream(self._stream):
            self._stream.wait_event(block.read)
            if block.failed:
                self._module.synchronize()
                block.failed = False
            memory = block.device_memory(layout.size, self._device)
            self.copy(memory, pinned)
            block.copied.record(self._stream)
        block.holds = found = PinnedOnItsWay(self._module, block, layout, memory)
        return found

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Send a copy to the stream that is current."""
        target.copy_(source, non_blocking=True)


class Block:
    """The memory of one batch after the other, on both sides, and how far they are."""

    def __init__(self, module: Any) -> None:
        self.copied = module.Event()
        self.read = module.Event()
        """Recorded behind what reads the memory of the device."""
        self.failed = False
        """Whether that was not recorded, because what reads it raised an error half-way."""
        self.holds: OnItsWay | None = None
        """The batch that is in it."""
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._memory: Tensor | None = None

    def pinned_memory(self, size: int) -> Tensor:
        """So many bytes that the system may not move; where it refuses them, others, and copies wait."""
        if self._pinned.nbytes < size:
            self._pinned = _pinned(size + size // SPARE)
        return self._pinned[:size]

    def device_memory(self, size: int, device: torch.device) -> Tensor:
        """So many bytes of the device."""
        if self._memory is None or self._memory.nbytes < size:
            self._memory = None  # first, because there may not be room for both
            self._memory = torch.empty(size + size // SPARE, dtype=torch.uint8, device=device)
        return self._memory[:size]


def _pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8)


class PinnedOnItsWay(OnItsWay):
    """Tensors whose copy runs by itself."""

    def __init__(self, module: Any, block: Block, layout: Layout, memory: Tensor) -> None:
        self._module, self._block, self._memory = module, block, memory
        self.tensors = layout.tensors(memory)

    @contextmanager
    def received(self) -> Iterator[Delivered]:
        block = self._block
        assert block.holds is self, "a batch whose memory was given to a later one"
        stream = self._module.current_stream()
        stream.wait_event(block.copied)
        try:
            yield Delivered(self.tensors, self._memory)
        except BaseException:
            block.failed = True
            raise
        block.read.record(stream)

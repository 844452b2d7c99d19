"""How fast a device is at its two tasks. One small matrix product: what of its time is arithmetic, and what is getting
there. Memory: copies within the machine's, to the device and within the device's, and permuted views.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapclip.machine.choose_device import device_of
from lapclip.machine.device import Device
from lapclip.measure.timing import Timer, run_in_new_process
from lapclip.model.block import Block

SIZE = 512
MANY = 100


@dataclass(frozen=True)
class ProductParts:
    """Where the time of one product goes, in milliseconds. The last four parts add up to `total_ms`."""

    size: int
    first_call_ms: float
    """What the first product of a young process costs on top: kernels are compiled, libraries set themselves up."""
    allocate_ms: float
    """Memory for the result, taken and given back."""
    launch_ms: float
    """Until the call returns; on the CPU, which works while it is called, the call of a product of 1 by 1."""
    synchronise_ms: float
    """Asking a device that has nothing left to do whether it is done; 0 on the CPU."""
    arithmetic_ms: float
    """What remains of a product that was waited for."""
    total_ms: float
    gflops: float
    """Rate of the arithmetic alone, in 1e9 operations a second."""


@dataclass(frozen=True)
class ManyProducts:
    """Products one after the other, waited for once."""

    size: int
    count: int
    seconds: float
    gflops: float


def product_parts(device: Device, size: int = SIZE, rounds: int = 51) -> ProductParts:
    """One product of two square matrices of float32, taken apart."""
    left, right, result = (torch.ones(size, size, device=device.torch) for _ in range(3))
    small = [torch.ones(1, 1, device=device.torch) for _ in range(3)]
    launches: list[float] = []

    def launch() -> None:
        began = time.perf_counter()
        torch.mm(left, right, out=result)
        launches.append(time.perf_counter() - began)

    timer = Timer(device.synchronise, rounds, warm_up_rounds=5)
    timings = timer.time_in_turns(
        {
            "allocate": lambda: torch.empty(size, size, device=device.torch),
            "waited": launch,
            "small": lambda: torch.mm(small[0], small[1], out=small[2]),
            "rest": lambda: None,
        }
    )
    medians = {name: timing.median for name, timing in timings.items()}
    rest = 0.0 if device.is_cpu else medians["rest"]
    launched = medians["small"] if device.is_cpu else sorted(launches)[len(launches) // 2]
    arithmetic = max(0.0, medians["waited"] - launched - rest)
    total = medians["allocate"] + launched + rest + arithmetic
    return ProductParts(
        size=size,
        first_call_ms=1e3 * max(0.0, first_call_seconds(device, size) - total),
        allocate_ms=1e3 * medians["allocate"],
        launch_ms=1e3 * launched,
        synchronise_ms=1e3 * rest,
        arithmetic_ms=1e3 * arithmetic,
        total_ms=1e3 * total,
        gflops=_gflops(size, 1, arithmetic),
    )


def many_products(
    device: Device, size: int = SIZE, count: int = MANY, rounds: int = 5
) -> ManyProducts:
    """Many products, each needing the one before, waited for at the end."""
    # Small numbers, so that a hundred products neither overflow nor fall to numbers that are slow to handle.
    start, factor = torch.eye(size, device=device.torch), torch.eye(size, device=device.torch)

    def run() -> Tensor:
        result = start
        for _ in range(count):
            result = result @ factor
        return result

    seconds = Timer(device.synchronise, rounds).time_one(run).median
    return ManyProducts(size, count, seconds, _gflops(size, count, seconds))


def first_call_seconds(device: Device, size: int) -> float:
    """The first product in a process of its own, waited for. Its memory is there before."""
    return run_in_new_process(__name__, {"device": device.kind, "size": size})["seconds"]


def _gflops(size: int, count: int, seconds: float) -> float:
    return 2 * size**3 * count / seconds / 1e9 if seconds > 0 else 0.0


def _answer(request: dict) -> dict:
    device, size = device_of(request["device"]), request["size"]
    left, right = (
        torch.ones(size, size, device=device.torch),
        torch.ones(size, size, device=device.torch),
    )
    return {"seconds": Timer(device.synchronise).time_once(lambda: torch.mm(left, right))}


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
    timings = Timer(device.synchronise, rounds).time_in_turns(runs)
    seconds = {name: timing.median for name, timing in timings.items()}
    passes = {"memory": 2, "within_device": 2, "to_device": 1, "to_device_pinned": 1}
    rates = {
        name: passes[name] * size / seconds[name] if name in seconds else None for name in passes
    }
    return CopyRates(**rates)  # pyright: ignore[reportArgumentType]


def transfer_times(device: Device, batch_size: int, side: int, rounds: int = 21) -> TransferTimes:
    """The images of a batch on their way to the device."""
    images = torch.zeros(batch_size, side, side, 3, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {"plain": lambda: images.to(device.torch)}
    if device.pins_memory:
        pinned = images.pin_memory()
        runs["pinned"] = lambda: pinned.to(device.torch, non_blocking=True)
    timings = Timer(device.synchronise, rounds).time_in_turns(runs)
    seconds = {name: timing.median for name, timing in timings.items()}
    return TransferTimes(seconds["plain"], seconds.get("pinned"))


@dataclass(frozen=True)
class LayoutTimes:
    """Milliseconds of one transformer block, forward and backward, by how its input lies in memory."""

    contiguous_ms: float
    """Batch first, as the block reads it."""
    permuted_ms: float
    """Tokens first, handed over as a view with the axes swapped."""


def layout_times(
    device: Device, batch: int, tokens: int, width: int, heads: int, rounds: int = 7
) -> LayoutTimes:
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
    timings = Timer(device.synchronise, rounds).time_in_turns(runs)
    times = {name: timing.median for name, timing in timings.items()}
    return LayoutTimes(1e3 * times["contiguous"], 1e3 * times["permuted"])


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))

"""Claims about single operations: products, copies, layouts in memory, compiled attention masks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.errors import first_line
from lapclip.machine.device import Device
from lapclip.measure.timing import MIN_SPEEDUP, Timer
from lapclip.model.block import Block
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.claims.finding import CannotMeasure, Finding, judge

PRODUCTS = 100
FREE_TRANSFER_SECONDS = 1e-4


@dataclass(frozen=True)
class ProductParts:
    """Milliseconds of one matrix product, and where they go."""

    allocate: float
    launch: float
    """Time until the call returns. On the CPU, that of a product of 1 by 1."""
    synchronize: float
    compute: float

    @property
    def total(self) -> float:
        return self.allocate + self.launch + self.synchronize + self.compute


def measure_product_parts(device: Device, size: int, rounds: int = 51) -> ProductParts:
    """Time one product of square matrices, and its parts."""
    left, right, result = (torch.ones(size, size, device=device.torch) for _ in range(3))
    one, other, small_result = (torch.ones(1, 1, device=device.torch) for _ in range(3))
    launch_seconds: list[float] = []

    def multiply() -> None:
        start = time.perf_counter()
        torch.mm(left, right, out=result)
        launch_seconds.append(time.perf_counter() - start)

    timings = Timer(device.synchronise, rounds, warm_up_rounds=5).time_in_turns(
        {
            "allocate": lambda: torch.empty(size, size, device=device.torch),
            "product": multiply,
            "small product": lambda: torch.mm(one, other, out=small_result),
            "nothing": lambda: None,
        }
    )
    if device.is_cpu:
        launch, synchronize = timings["small product"].median, 0.0
    else:
        launch, synchronize = float(np.median(launch_seconds)), timings["nothing"].median
    return ProductParts(
        allocate=1e3 * timings["allocate"].median,
        launch=1e3 * launch,
        synchronize=1e3 * synchronize,
        compute=1e3 * max(0.0, timings["product"].median - launch - synchronize),
    )


def measure_one_product(bench: Bench) -> tuple[ProductParts, ProductParts]:
    """Return the parts of a product on the CPU and on the accelerator."""
    accelerator = bench.require_accelerator()
    return (
        measure_product_parts(bench.cpu, bench.product_size),
        measure_product_parts(accelerator, bench.product_size),
    )


def judge_one_product(parts: tuple[ProductParts, ProductParts]) -> Finding:
    cpu, gpu = parts
    return judge(
        gpu.total > cpu.total * MIN_SPEEDUP,
        f"{cpu.total:.3f} ms CPU; {gpu.total:.3f} ms GPU: allocate {gpu.allocate:.3f}, "
        f"launch {gpu.launch:.3f}, synchronize {gpu.synchronize:.3f}, compute {gpu.compute:.3f}",
        "waited for, after a warm-up",
    )


def time_dependent_products(device: Device, size: int) -> float:
    """Return the seconds of many products, each of which needs the one before."""
    # With the identity, results neither overflow nor become numbers that are slow to handle.
    factor = torch.eye(size, device=device.torch)

    def multiply() -> None:
        result = factor
        for _ in range(PRODUCTS):
            result = result @ factor

    return Timer(device.synchronise).time_one(multiply).median


def measure_many_products(bench: Bench) -> tuple[float, float]:
    """Return the seconds of many products on the CPU and on the accelerator."""
    accelerator = bench.require_accelerator()
    return (
        time_dependent_products(bench.cpu, bench.product_size),
        time_dependent_products(accelerator, bench.product_size),
    )


def judge_many_products(seconds: tuple[float, float]) -> Finding:
    cpu, gpu = seconds
    return judge(
        gpu > cpu * MIN_SPEEDUP,
        f"{cpu:.4f} s CPU, {gpu:.4f} s GPU ({gpu / cpu:.2f}x)",
        f"{PRODUCTS} dependent products, waited for",
    )


@dataclass(frozen=True)
class Transfer:
    """Seconds to bring the images of a batch to the accelerator."""

    plain: float
    pinned: float | None
    """From memory that the system may not move. None if the device cannot copy from such memory."""
    shares_memory: bool = False
    """Whether the accelerator works in the machine's own memory."""


def measure_transfer(bench: Bench) -> Transfer:
    """Time the images of a batch on their way to the accelerator."""
    device = bench.require_accelerator()
    side = bench.shape.image_size
    images = torch.zeros(bench.batch, side, side, 3, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {"plain": lambda: images.to(device.torch)}
    if device.pins_memory:
        pinned_images = images.pin_memory()
        runs["pinned"] = lambda: pinned_images.to(device.torch, non_blocking=True)
    timings = Timer(device.synchronise, rounds=21).time_in_turns(runs)
    pinned = timings["pinned"].median if "pinned" in timings else None
    return Transfer(timings["plain"].median, pinned, device.shares_memory)


def judge_free_transfer(transfer: Transfer) -> Finding:
    text = f"{transfer.plain * 1e3:.3f} ms to bring a batch of images to the device"
    if not transfer.shares_memory:  # the claim is about shared memory only
        raise CannotMeasure(f"memory is not shared here; {text}")
    return judge(transfer.plain < FREE_TRANSFER_SECONDS, text, "free would be below 0.1 ms")


def judge_pinning(transfer: Transfer) -> Finding:
    if transfer.pinned is None:
        raise CannotMeasure("this device copies from no pinned memory")
    return judge(
        transfer.plain > transfer.pinned * MIN_SPEEDUP,
        f"{transfer.pinned * 1e3:.3f} ms pinned, {transfer.plain * 1e3:.3f} ms not",
        "the images of a batch to the device",
    )


def measure_copy_rate(bench: Bench) -> float:
    """Return the bytes per second that a large copy reads and writes on the CPU."""
    source = torch.ones(bench.copy_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    timing = Timer().time_one(lambda: target.copy_(source))
    return 2 * bench.copy_bytes / timing.median


@dataclass
class MaskTrial:
    """Ways to compile a causal mask: those that work, and those that do not, with the fault."""

    working: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)


CAST_MASK = "a .bool() mask"
BOOL_MASK = "a bool mask"


def attend_with_bool_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention with a mask that is made with dtype bool."""
    scores = torch.matmul(query, key.transpose(-2, -1))
    mask = torch.triu(torch.ones(scores.shape[-2], scores.shape[-1], dtype=torch.bool), diagonal=1)
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ value


def attend_with_cast_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention with a mask that is cast to bool."""
    scores = torch.matmul(query, key.transpose(-2, -1))
    mask = torch.triu(torch.ones(scores.shape[-2], scores.shape[-1]), diagonal=1).bool()
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ value


def try_masks(bench: Bench) -> MaskTrial:
    """Script and compile attention with both masks, and compare with the plain computation."""
    draw = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(2, 16, 8, generator=draw) for _ in range(3))
    expected = attend_with_bool_mask(*inputs)
    compilers: dict[str, Callable[..., Any]] = {"scripting": torch.jit.script}
    can_compile = find_fault(lambda: torch.compile(torch.neg)(expected), -expected) is None
    if can_compile:
        compilers["compiling"] = torch.compile
    trial = MaskTrial()
    for how, compiler in compilers.items():
        for mask, attend in (
            (CAST_MASK, attend_with_cast_mask),
            (BOOL_MASK, attend_with_bool_mask),
        ):
            name = f"{how} {mask}"
            fault = find_fault(lambda c=compiler, a=attend: c(a)(*inputs), expected)
            if fault is None:
                trial.working.append(name)
            else:
                trial.faults[name] = fault
    return trial


def find_fault(run: Callable[[], Tensor], expected: Tensor) -> str | None:
    """Return what is wrong with a computation, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script is deprecated
            result = run()
    except Exception as error:  # compilers fail in many ways
        return f"{type(error).__name__}: {first_line(error, 80)}"
    return None if torch.allclose(result, expected, atol=1e-5) else "another result"


def judge_masks(trial: MaskTrial) -> Finding:
    faults = [f"{name}: {fault}" for name, fault in trial.faults.items()]
    working = ", ".join(trial.working) or "nothing"
    return judge(
        any(CAST_MASK in name for name in trial.faults),
        "; ".join([*faults, f"works: {working}"]),
        f"torch {torch.__version__}; to work is to give what the plain computation gives",
    )


def try_numpy(bench: Bench) -> str | None:
    """Bring an array to torch and back, sharing memory. Returns what is wrong, or None."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    try:
        tensor = torch.from_numpy(array)
        tensor.mul_(2)
        is_right = np.array_equal(array, [[0, 2, 4], [6, 8, 10]])
        if is_right and np.array_equal(tensor.numpy(), array):
            return None
    except Exception as error:  # what a build of torch without NumPy raises
        return f"{type(error).__name__}: {error}"
    return "numbers differ on the way"


def judge_numpy(fault: str | None) -> Finding:
    result = fault or "arrays go both ways"
    versions = f"NumPy {np.__version__} with torch {torch.__version__}"
    return judge(fault is not None, f"{versions}: {result}", "true of torch before 2.3")


@dataclass(frozen=True)
class LayoutSeconds:
    """Seconds of one block, forward and backward, by how its input lies in memory."""

    contiguous: float
    """Batch first, as the block reads it."""
    permuted: float
    """Tokens first, handed over as a view with swapped axes."""


def measure_layouts(bench: Bench) -> LayoutSeconds:
    """Time a block of the image tower on the same numbers in two layouts."""
    shape, device = bench.shape, bench.cpu
    tokens = 1 + (shape.image_size // shape.patch) ** 2
    block = Block(shape.image_width, shape.image_heads, causal=False)
    block.initialise(1, torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    contiguous = torch.randn(bench.batch, tokens, shape.image_width, generator=draw)
    permuted = contiguous.transpose(0, 1).contiguous().transpose(0, 1)

    def run(inputs: Tensor) -> None:
        block.zero_grad(set_to_none=True)
        block(inputs.detach().requires_grad_()).sum().backward()

    timings = Timer(device.synchronise, 3 * bench.rounds).time_in_turns(
        {"contiguous": lambda: run(contiguous), "permuted": lambda: run(permuted)}
    )
    return LayoutSeconds(timings["contiguous"].median, timings["permuted"].median)


def judge_layouts(seconds: LayoutSeconds) -> Finding:
    ratio = seconds.permuted / seconds.contiguous
    return judge(
        ratio > MIN_SPEEDUP,
        f"{ratio:.2f}x ({seconds.contiguous * 1e3:.1f} ms against {seconds.permuted * 1e3:.1f} ms)",
        "one block of the model, forward and backward; 3 % faster holds",
    )

"""Claims about the CPU against an accelerator: without one they cannot be measured, and nothing stands in for it."""

from __future__ import annotations

from lapclip.claims import judge
from lapclip.claims.bench import Bench, parameters
from lapclip.claims.judge import Finding, unknown
from lapclip.machine.device import Device
from lapclip.microscope.memory_speed import transfer_times
from lapclip.microscope.products import many_products, product_parts

ABSENT = "torch finds no accelerator here"
LARGE_BATCH = 32


def one_product(bench: Bench) -> Finding:
    """Claim 1. Without an accelerator the CPU's time is given with the reason, and decides nothing."""
    cpu = product_parts(bench.cpu, bench.product_size)
    if bench.accelerator is None:
        return unknown(f"{ABSENT}; the CPU takes {cpu.total_ms:.3f} ms, {cpu.gflops:,.0f} GFLOP/s")
    return judge.one_product(cpu, product_parts(bench.accelerator, bench.product_size))


def hundred_products(bench: Bench) -> Finding:
    """Claim 2."""
    cpu = many_products(bench.cpu, bench.product_size)
    if bench.accelerator is None:
        return unknown(f"{ABSENT}; the CPU takes {cpu.seconds:.3f} s, {cpu.gflops:,.0f} GFLOP/s")
    return judge.hundred_products(cpu, many_products(bench.accelerator, bench.product_size))


def cpu_trains_faster(bench: Bench) -> Finding:
    """Claim 3: a step of the published model."""
    if bench.accelerator is None:
        return unknown(ABSENT)
    return judge.cpu_trains_faster(
        bench.phases.total,
        bench.seconds(bench.shape, bench.batch, bench.accelerator),
        parameters(bench.shape),
        bench.batch,
    )


def three_thresholds(bench: Bench) -> Finding:
    """Claim 4: one step below all three thresholds, one above them."""
    if bench.accelerator is None:
        return unknown(ABSENT)
    below = (bench.phases.total, bench.seconds(bench.shape, bench.batch, bench.accelerator))
    above = _both(bench, bench.accelerator, LARGE_BATCH)
    sizes = tuple(
        f"{parameters(shape) / 1e6:.0f} M and batch {batch}"
        for shape, batch in ((bench.shape, bench.batch), (bench.larger, LARGE_BATCH))
    )
    return judge.three_thresholds(below, above, (sizes[0], sizes[1]))


def free_transfers(bench: Bench) -> Finding:
    """Claim 5."""
    if bench.accelerator is None:
        return unknown(f"{ABSENT}, so nothing is transferred")
    times = transfer_times(bench.accelerator, bench.batch, bench.shape.image_size)
    return judge.free_transfers(times, bench.accelerator.shares_memory)


def larger_models(bench: Bench) -> Finding:
    """Claim 25: a step of a model above 100 M."""
    if bench.accelerator is None:
        return unknown(ABSENT)
    return judge.larger_models(*_both(bench, bench.accelerator, bench.batch), parameters(bench.larger))


def pinning(bench: Bench) -> Finding:
    """Claim 26."""
    if bench.accelerator is None:
        return unknown(f"{ABSENT}, so there is nothing to pin memory for")
    return judge.pinning(transfer_times(bench.accelerator, bench.batch, bench.shape.image_size))


def _both(bench: Bench, accelerator: Device, batch: int) -> tuple[float, float]:
    """Seconds of a step of the larger model on the CPU and on the accelerator."""
    cpu, other = (bench.seconds(bench.larger, batch, device) for device in (bench.cpu, accelerator))
    return cpu, other

"""What a claim is, what was found about it, and the verdict on each.

Verdicts are functions of what was measured: nothing is measured here, so that both sides of each threshold can be
tested.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lapclip.measure.timing import MIN_SPEEDUP
from lapclip.microscope.device_speed import ManyProducts, ProductParts, TransferTimes
from lapclip.text import counted
from lapclip.tuning.memory_probe import StepMemory

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be measured here"
CLAIMS = Path(__file__).parent / "claims.toml"
PUBLISHED_SHARES = {
    "load": 0.015, "preprocess": 0.029, "transfer": 0.0, "forward": 0.400, "backward": 0.513, "optimizer": 0.043,
}  # fmt: skip
PUBLISHED_MEMORY = {"parameters": 2.5e9, "gradients": 0.3e9, "optimizer": 0.1e9}
CLAIMED_CORES = (8, 4)
"""All cores, and those that torch takes by default: the performance cores."""
SMALL_MACHINE = 8e9
"""The memory of the machine the claims come from."""


@dataclass(frozen=True)
class Claim:
    """Something published, with its number."""

    number: int
    claim: str
    published: str
    kind: str
    """`machine`, `accelerator`, `run` or `arithmetic`: what it takes to measure it."""
    background: str = ""
    """Facts from the public source that explain the published figure."""


@dataclass(frozen=True)
class Finding:
    """The number here, what it says of the claim, and why."""

    here: str | None
    verdict: str
    reason: str

    def __post_init__(self) -> None:
        assert (self.here is None) == (self.verdict == UNKNOWN), (
            "a number exactly where there is a verdict"
        )


def judged(true: bool, here: str, reason: str) -> Finding:
    """A claim that was measured."""
    return Finding(here, HOLDS if true else FAILS, reason)


def unknown(reason: str) -> Finding:
    """A claim that this machine cannot measure."""
    return Finding(None, UNKNOWN, reason)


def all_claims() -> list[Claim]:
    """The published claims, by number."""
    return [
        Claim(**values) for values in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]
    ]


def row(claim: Claim, finding: Finding) -> dict[str, Any]:
    """Return a claim with its finding, as JSON has it."""
    fields = {"number": claim.number, "claim": claim.claim, "published": claim.published}
    fields |= asdict(finding)
    if claim.background:
        fields["reason"] = f"{finding.reason}; {claim.background}"
    return fields


def one_product(cpu: ProductParts, other: ProductParts) -> Finding:
    """Claim 1."""
    here = (
        f"{cpu.total_ms:.3f} ms CPU; {other.total_ms:.3f} ms GPU: allocate {other.allocate_ms:.3f}, launch "
        f"{other.launch_ms:.3f}, synchronise {other.synchronise_ms:.3f}, compute {other.arithmetic_ms:.3f}"
    )
    return judged(
        other.total_ms > cpu.total_ms * MIN_SPEEDUP,
        here,
        f"waited for and warm; the first call costs {cpu.first_call_ms:.1f} and {other.first_call_ms:.1f} ms more",
    )


def hundred_products(cpu: ManyProducts, other: ManyProducts) -> Finding:
    """Claim 2."""
    here = (
        f"{cpu.seconds:.4f} s CPU, {other.seconds:.4f} s GPU ({other.seconds / cpu.seconds:.2f}x)"
    )
    return judged(
        other.seconds > cpu.seconds * MIN_SPEEDUP,
        here,
        f"{cpu.count} dependent products of {cpu.size}, waited for",
    )


def cpu_trains_faster(cpu: float, other: float, parameters: int, batch: int) -> Finding:
    """Claim 3: seconds of a step on the CPU and on the accelerator."""
    here = (
        f"CPU {cpu * 1e3:.0f} ms, GPU {other * 1e3:.1f} ms: the GPU is {cpu / other:.2f}x the CPU"
    )
    return judged(
        cpu * MIN_SPEEDUP < other,
        here,
        f"one float32 step, {parameters / 1e6:.1f} M parameters, batch {batch}",
    )


def three_thresholds(
    below: tuple[float, float], above: tuple[float, float], sizes: tuple[str, str]
) -> Finding:
    """Claim 4: (CPU, accelerator) seconds of a step below all thresholds and above all of them."""
    here = f"GPU {below[0] / below[1]:.2f}x the CPU at {sizes[0]}, {above[0] / above[1]:.2f}x at {sizes[1]}"
    return judged(
        below[0] < below[1] and above[1] < above[0],
        here,
        "the rule holds where the CPU wins below the thresholds and the GPU above them",
    )


def free_transfers(times: TransferTimes, shared: bool) -> Finding:
    """Claim 5. It is about memory that is shared; a transfer elsewhere says nothing of it."""
    text = f"{times.plain * 1e3:.3f} ms to bring a batch of 12 images to the device"
    if shared:
        return judged(times.plain < 1e-4, text, "free would be below 0.1 ms")
    return unknown(f"memory is not shared here; {text}")


def half_precision(
    step: Mapping[str, float], small: Mapping[str, float], spikes: Mapping[str, int]
) -> Finding:
    """Claim 6: seconds of the real step, seconds of a small model's step, and spikes in its loss, by precision."""
    gains = {name: step["float32"] / seconds for name, seconds in step.items() if name != "float32"}
    extra = {
        name: small["float32"] / seconds
        for name, seconds in small.items()
        if name != "float32" and name not in gains
    }
    ratios = [f"{name} {gain:.2f}x" for name, gain in gains.items()]
    ratios += [f"{name} {gain:.2f}x in a small model" for name, gain in extra.items()]
    jumps = ", ".join(f"{name} {count}" for name, count in spikes.items())
    helps = max([*gains.values(), *extra.values()], default=0.0) >= MIN_SPEEDUP
    return judged(
        not helps,
        f"against float32: {', '.join(ratios)}",
        f"float32 {step['float32']:.2f} s a step; loss spikes in 50 steps of a small model: {jumps}",
    )


def batch_shares(shares: Mapping[str, float], total: float, tolerance: float = 0.05) -> Finding:
    """Claim 7."""
    off = [
        name for name in PUBLISHED_SHARES if abs(shares[name] - PUBLISHED_SHARES[name]) > tolerance
    ]
    here = (
        ", ".join(f"{name} {shares[name]:.1%}" for name in PUBLISHED_SHARES) + f", of {total:.2f} s"
    )
    reason = (
        f"every share within {tolerance * 100:.0f} points"
        if not off
        else f"{', '.join(off)} differ by more"
    )
    return judged(
        not off,
        here,
        f"{reason}; batches are prepared by a thread, so load is what the step waited for",
    )


def peak_memory(memory: StepMemory) -> Finding:
    """Claim 8: the peak and its split, each within a fifth."""
    here = f"{memory.peak / 1e9:.2f} GB: " + ", ".join(
        f"{name} {size / 1e9:.2f}" for name, size in memory.parts.items()
    )
    published = {"peak": 3.0e9, **PUBLISHED_MEMORY}
    off = [name for name, size in published.items() if abs(getattr(memory, name) / size - 1) > 0.2]
    reason = "all within 20 %" if not off else f"more than 20 % off: {', '.join(off)}"
    return judged(
        not off, here, f"{reason}; float32 parameters take 4 bytes each and Adam's state 8"
    )


def checkpoint_size(size: int, parameters: int) -> Finding:
    """Claim 9."""
    here = f"{size / 1e6:,.0f} MB, {size / parameters:.2f} bytes a parameter"
    return judged(
        abs(size / 920e6 - 1) < 0.02,
        here,
        f"a real checkpoint of {parameters:,} parameters; within 2 %",
    )


def other_cores(cores: int, performance: int) -> Finding:
    """Claim 10, where the cores are not the claim's."""
    return unknown(
        f"it takes 4 performance and 4 efficiency cores; here torch sees {cores} and uses {performance}"
    )


def best_threads(seconds: Mapping[int, float]) -> Finding:
    """Claim 10: seconds of a step by the number of threads."""
    here = ", ".join(
        f"{counted(count, 'thread')} {spent:.2f} s" for count, spent in seconds.items()
    )
    best = min(seconds.values())
    return judged(
        seconds[8] <= best * MIN_SPEEDUP,
        here,
        "intra-op threads alone; holds where 8 are within 3 % of the best",
    )


def workers_pay(in_line: float, workers: float, start: float) -> Finding:
    """Claim 11: seconds a step, loading in line and by worker processes."""
    here = (
        f"{in_line / workers:.2f}x loading in line ({workers:.2f} s a step against {in_line:.2f} s)"
    )
    return judged(
        in_line > workers * MIN_SPEEDUP, here, f"4 workers; their first batch took {start:.1f} s"
    )


def best_batch(rates: Mapping[int, float], peaks: Mapping[int, float]) -> Finding:
    """Claim 12: pairs a second and bytes by batch size; what needs more than 8 GB does not count."""
    fitting = {size: rate for size, rate in rates.items() if peaks[size] <= SMALL_MACHINE}
    here = ", ".join(
        f"{size}: {rate:.2f} pairs/s, {peaks[size] / 1e9:.1f} GB" for size, rate in rates.items()
    )
    best = max(fitting, key=fitting.__getitem__)
    return judged(
        fitting[12] * MIN_SPEEDUP >= fitting[best],
        here,
        f"by speed within 8 GB; the fastest tried is {best}; memory beyond 12 is predicted from its parts",
    )


def bandwidth(traffic: float, seconds: float, available: float) -> Finding:
    """Claim 16: bytes a step asks for, its seconds, and the bytes a second that a copy reaches."""
    used = traffic / seconds
    return judged(
        used < 0.8 * available,
        f"{used / 1e9:.1f} of {available / 1e9:.1f} GB/s ({used / available:.0%})",
        f"operations read and write {traffic / 1e9:.1f} GB a step, counted, caches left out; below 80 % holds",
    )


def accumulation(peak: int, cosine: float) -> Finding:
    """Claim 23."""
    return judged(
        peak <= SMALL_MACHINE,
        f"{peak / 1e9:.2f} GB at batch 12, of 8 GB",
        f"nor would it give more negatives: the gradients of two halves have a cosine of {cosine:.2f} with the batch's",
    )


def larger_models(cpu: float, other: float, parameters: int) -> Finding:
    """Claim 25."""
    ratio = cpu / other
    return judged(
        1.5 <= ratio <= 2.0,
        f"{ratio:.2f}x the CPU at {parameters / 1e6:.0f} M",
        "one float32 step at batch 12",
    )


def pinning(times: TransferTimes) -> Finding:
    """Claim 26."""
    if times.pinned is None:
        return unknown("this device copies from no pinned memory")
    here = f"{times.pinned * 1e3:.3f} ms pinned, {times.plain * 1e3:.3f} ms not"
    return judged(
        times.plain > times.pinned * MIN_SPEEDUP, here, "the images of a batch of 12 to the device"
    )


def contiguous(contiguous_ms: float, permuted_ms: float) -> Finding:
    """Claim 30."""
    here = (
        f"{permuted_ms / contiguous_ms:.2f}x ({contiguous_ms:.1f} ms against {permuted_ms:.1f} ms)"
    )
    return judged(
        permuted_ms > contiguous_ms * MIN_SPEEDUP,
        here,
        "one block of the model, forward and backward; 3 % faster holds",
    )

"""How many threads prepare batches: as few as keep up with the step."""

from __future__ import annotations

import time

from lapclip.config import AUTO
from lapclip.data.batches import BatchPlan, prefetch
from lapclip.machine.facts import logical_cores

BATCHES = 8
AT_EASE = 0.5
"""A thread that is busy for less than this share of a step keeps up even while the cores are in use."""


def choose_loader_threads(asked: int | str, plan: BatchPlan, seconds_a_step: float | None) -> tuple[int, str]:
    """Loader threads, and why. Without the time of a step there is nothing to keep up with, and one is plenty."""
    if asked != AUTO:
        return int(asked), "asked for"
    if seconds_a_step is None:
        return 1, "one prepares the next batch while a step runs"
    plan.batch(1)  # the first draws the order of the epoch
    times = {1: time_batches(plan, 1)}
    step = f"a step takes {seconds_a_step * 1e3:.1f} ms"
    while times[max(times)] > AT_EASE * seconds_a_step and 2 * max(times) <= logical_cores():
        times[2 * max(times)] = time_batches(plan, 2 * max(times))
    best = min(times, key=lambda threads: (times[threads] > AT_EASE * seconds_a_step, round(times[threads], 4)))
    others = "".join(f", {seconds * 1e3:.1f} ms by {threads}" for threads, seconds in times.items() if threads != best)
    return best, f"a batch is ready every {times[best] * 1e3:.1f} ms by {best}{others}; {step}"


def time_batches(plan: BatchPlan, threads: int) -> float:
    """Seconds a batch, when nothing else is done."""
    began = time.perf_counter()
    count = sum(1 for _ in prefetch(plan, 1, BATCHES, threads=threads))
    return (time.perf_counter() - began) / count

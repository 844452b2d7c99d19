"""The one stopwatch: how long something takes, and where the time of a step goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = ("load", "preprocess", "transfer", "forward", "backward", "optimizer")


WORTH = 1.03
"""How many times as fast something has to be to count as faster: less is noise."""
Synchronise = Callable[[], None]
"""Waits until a device has computed everything asked for: `Device.synchronise`."""


def timed(run: Callable[[], object], synchronise: Synchronise) -> float:
    """Seconds from a device at rest to a device at rest again."""
    synchronise()
    began = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - began


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    synchronise: Synchronise,
    rounds: int = 5,
    seconds: float = 4.0,
    warm_up: int = 1,
    least_rounds: int = 1,
) -> dict[str, float]:
    """The median seconds of each, taken alternately, so that a machine that drifts drifts for all.

    Ends early after `seconds`, but not before the least number of full rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            spent = timed(run, synchronise)
            if turn >= warm_up:
                times[name].append(spent)
        if turn >= warm_up + least_rounds - 1 and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(spent) for name, spent in times.items()}


def measured(step: int) -> bool:
    """Whether the phases of a step are measured: waiting for each phase to end slows a step, so only now and then."""
    return step <= 10 or step % 50 == 0


class Stopwatch:
    """Seconds per phase of one step; counts nothing when it is off."""

    def __init__(self, synchronise: Synchronise, *, on: bool) -> None:
        self._synchronise = synchronise
        self._seconds: dict[str, float] | None = {name: 0.0 for name in PHASES} if on else None  # noqa: C420

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._seconds is None:
            yield
            return
        start = time.perf_counter()
        yield
        self._synchronise()
        self._seconds[name] += time.perf_counter() - start

    def discard(self) -> None:
        """Forget what was measured: the step turned out to have no phases."""
        self._seconds = None

    @property
    def seconds(self) -> dict[str, float] | None:
        """Seconds by phase, or None where they were not measured."""
        return self._seconds

"""Where the time of a step goes, and that of a command. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("load", "preprocess", "transfer", "forward", "backward", "optimizer")
"""Of every step; where several ranks share it, they also wait for an "exchange"."""
Synchronise = Callable[[], None]
"""Waits until a device has computed everything asked for: `Device.synchronise`."""


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
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def discard(self) -> None:
        """Forget what was measured: the step turned out to have no phases."""
        self._seconds = None

    @property
    def seconds(self) -> dict[str, float] | None:
        """Seconds by phase, or None where they were not measured."""
        return self._seconds


class Laps:
    """Seconds of what happens once, one phase after the other: where the time of a command goes beside its steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """What has happened since the last call was this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

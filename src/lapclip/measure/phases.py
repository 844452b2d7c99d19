"""Divide the time of a step, or of a command, into phases. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("load", "preprocess", "transfer", "forward", "backward", "optimizer")
"""Phases of every step. With several ranks there is also an "exchange"."""


def measures_phases(step: int) -> bool:
    """Return whether a step measures its phases: waiting for each to end slows a step down."""
    return step <= 10 or step % 50 == 0


class Stopwatch:
    """Seconds per phase of one step. Counts nothing when it is off."""

    def __init__(self, synchronize: Callable[[], None], *, on: bool) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] | None = None
        if on:
            self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the `with` to a phase."""
        if self._seconds is None:
            yield
            return
        start = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def discard(self) -> None:
        """Forget what was measured: the step turned out to have no phases."""
        self._seconds = None

    @property
    def seconds(self) -> dict[str, float] | None:
        """Seconds by phase. None if they were not measured."""
        return self._seconds


class Laps:
    """Seconds of the parts of a command that come one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

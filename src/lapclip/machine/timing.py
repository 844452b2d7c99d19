"""The one stopwatch: where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("load", "preprocess", "transfer", "forward", "backward", "optimizer")


def measured(step: int) -> bool:
    """Whether the phases of a step are measured: waiting for each phase to end slows a step, so only now and then."""
    return step <= 10 or step % 50 == 0


class Stopwatch:
    """Seconds per phase of one step; counts nothing when it is off."""

    def __init__(self, synchronise: Callable[[], None], *, on: bool) -> None:
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

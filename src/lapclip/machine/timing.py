"""Where the time of a step goes, and that of a command. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

PHASES = ("load", "preprocess", "transfer", "forward", "backward", "optimizer")
"""Of every step; where several ranks share it, they also wait for an "exchange", and where towers are on two devices,
that is what crosses over and the loss."""
Synchronise = Callable[[], None]
"""Waits until a device has computed everything asked for: `Device.synchronise`."""


def measured(step: int) -> bool:
    """Whether the phases of a step are measured: waiting for each phase to end slows a step, so only now and then."""
    return step <= 10 or step % 50 == 0


class TowerSeconds(NamedTuple):
    """Of one tower in a step, while both compute on devices of their own."""

    computed: float
    waited: float
    """For the other tower."""


class Stopwatch:
    """Seconds per phase of one step; counts nothing when it is off."""

    def __init__(self, synchronise: Synchronise, *, on: bool) -> None:
        self._synchronise = synchronise
        self._seconds: dict[str, float] | None = {name: 0.0 for name in PHASES} if on else None  # noqa: C420
        self._towers: dict[str, TowerSeconds] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._seconds is None:
            yield
            return
        start = time.perf_counter()
        yield
        self._synchronise()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def on(self) -> bool:
        return self._seconds is not None

    def add_towers(self, seconds: Mapping[str, float]) -> None:
        """Count a stretch in which towers computed at once on devices of their own: the first to end waits."""
        longest = max(seconds.values())
        for tower, computed in seconds.items():
            before = self._towers.get(tower, TowerSeconds(0.0, 0.0))
            self._towers[tower] = TowerSeconds(
                before.computed + computed, before.waited + longest - computed
            )

    @property
    def towers(self) -> dict[str, dict[str, float]] | None:
        """Seconds that each tower has computed, and waited for the other; None where they do not compute at once."""
        return (
            {tower: found._asdict() for tower, found in self._towers.items()}
            if self.on and self._towers
            else None
        )

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

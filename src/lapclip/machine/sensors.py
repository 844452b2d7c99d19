"""What a run records about the machine while it trains: energy, heat, clock, cores and swap. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from lapclip.machine import facts, heat, nvml
from lapclip.machine.energy import Energy

EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Sample:
    """The sensors at one moment; None is unknown."""

    joules: dict[str, float] | None
    """Since the process began to watch, by source."""
    celsius: float | None
    """The hotter of processor and GPU."""
    megahertz: float | None
    core_use: list[float]
    """Share of each core in use since the sample before."""
    swap_bytes: int
    throttled: bool | None
    """Held back because of heat since the sample before."""
    reason: str | None
    """Why the energy of some part is not known."""


class Sensors:
    """Reads the sensors of this machine, each found once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._energy = Energy()
        self._temperature, self._megahertz, self._throttling = heat.thermometer(), heat.clock(), heat.throttling()
        self._gpus = nvml.gpus()
        psutil.cpu_percent(percpu=True)  # the first answer of a process means nothing

    def due(self) -> bool:
        """Whether the last sample is old enough for another."""
        return self._last is None or self._clock() - self._last >= EVERY_SECONDS

    def sample(self) -> Sample:
        """Read them all."""
        self._last = self._clock()
        celsius = [self._temperature(), *(gpu.celsius for gpu in self._gpus)]
        throttled = [self._throttling(), *(gpu.throttled for gpu in self._gpus)]
        return Sample(
            joules=self._energy.joules(),
            celsius=max((degrees for degrees in celsius if degrees is not None), default=None),
            megahertz=self._megahertz(),
            core_use=[round(percent / 100, 4) for percent in psutil.cpu_percent(percpu=True)],
            swap_bytes=facts.swap_bytes(),
            throttled=any(throttled) if any(known is not None for known in throttled) else None,
            reason=self._energy.reason,
        )

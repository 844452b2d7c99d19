"""When a polite run should leave the machine to others. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lapclip.machine.other_programs import BUSY_SHARE, OtherPrograms
from lapclip.machine.sensors import power, throttling
from lapclip.machine.system_memory import swap_bytes

EVERY = 5.0
"""Seconds between two readings."""
READINGS = 2
"""Readings in a row that must agree before a run pauses or goes on: a moment's load is nobody's need."""
SWAP, SWAP_READINGS = 500_000_000, 12
"""Bytes by which swap may grow within so many readings, a minute, before memory counts as short. Swap that has grown
stays; only growing is trouble."""


@dataclass(frozen=True)
class Reading:
    """The machine at one moment; None is unknown."""

    battery_percent: float | None
    """None on mains."""
    throttled: bool | None
    swap_bytes: int
    others: float | None
    """The share of the cores that other programs use."""


class MachineReader:
    """Reads the state of this machine. The shares are those since the reading before."""

    def __init__(self) -> None:
        self._throttling, self._others = throttling(), OtherPrograms()

    def __call__(self) -> Reading:
        found = power()
        return Reading(
            battery_percent=found.battery_percent if found.source == "battery" else None,
            throttled=self._throttling(),
            swap_bytes=swap_bytes(),
            others=self._others(),
        )


class PolitePauses:
    """Says why a run should pause, once that is clear, and that it may go on, once that is clear."""

    def __init__(
        self,
        battery: int,
        read: Callable[[], Reading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._battery, self._read, self._clock = battery, read or MachineReader(), clock
        self._swap = deque([self._read().swap_bytes], maxlen=SWAP_READINGS)
        self._reason: str | None = None
        self._agreeing = 0
        self._next = clock() + EVERY

    def reason(self) -> str | None:
        """Why to pause now, or None. Reads the machine at most every few seconds."""
        if self._clock() < self._next:
            return self._reason
        self._next = self._clock() + EVERY
        found = self._need(self._read())
        if (found is None) == (self._reason is None):
            self._agreeing = 0
            self._reason = found and self._reason  # the first reason stands until it is over
            return self._reason
        self._agreeing += 1
        if self._agreeing >= READINGS:
            self._reason, self._agreeing = found, 0
        return self._reason

    def _need(self, reading: Reading) -> str | None:
        self._swap.append(reading.swap_bytes)
        if reading.battery_percent is not None and reading.battery_percent < self._battery:
            return f"on battery, {reading.battery_percent:.0f} % left"
        if reading.throttled:
            return "the processor is held back because of heat"
        if reading.swap_bytes - min(self._swap) > SWAP:
            return "memory is short, the system swaps"
        if reading.others is not None and reading.others > BUSY_SHARE:
            return f"other programs use {reading.others:.0%} of the cores"
        return None

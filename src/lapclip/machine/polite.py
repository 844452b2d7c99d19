"""When a polite run should leave the machine to others. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from lapclip.machine import facts, heat
from lapclip.machine.other_load import BUSY
from lapclip.machine.power import power

EVERY = 5.0
"""Seconds between two looks."""
LOOKS = 2
"""Looks in a row that must agree before a run pauses or goes on: a moment's load is nobody's need."""
SWAP, SWAP_LOOKS = 500_000_000, 12
"""Bytes by which swap may grow within so many looks, a minute, before memory counts as short. Swap that has grown
stays; only growing is trouble."""


@dataclass(frozen=True)
class Look:
    """The machine at one moment; None is unknown."""

    battery_percent: float | None
    """None on mains."""
    throttled: bool | None
    swap_bytes: int
    others: float
    """The share of the cores that other programs use."""


class Eyes:
    """Looks at this machine. The shares are those since the look before."""

    def __init__(self) -> None:
        self._throttling = heat.throttling()
        self._own = psutil.Process()
        self._own.cpu_percent()
        psutil.cpu_percent()

    def __call__(self) -> Look:
        found = power()
        own = self._own.cpu_percent() / 100 / (psutil.cpu_count() or 1)  # of all cores, as the whole is
        return Look(
            battery_percent=found.battery_percent if found.source == "battery" else None,
            throttled=self._throttling(),
            swap_bytes=facts.swap_bytes(),
            others=max(0.0, psutil.cpu_percent() / 100 - own),
        )


class PolitePauses:
    """Says why a run should pause, once that is clear, and that it may go on, once that is clear."""

    def __init__(
        self, battery: int, look: Callable[[], Look] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._battery, self._look, self._clock = battery, look or Eyes(), clock
        self._swap = deque([self._look().swap_bytes], maxlen=SWAP_LOOKS)
        self._reason: str | None = None
        self._agreeing = 0
        self._next = clock() + EVERY

    def reason(self) -> str | None:
        """Why to pause now, or None. Looks at most every few seconds."""
        if self._clock() < self._next:
            return self._reason
        self._next = self._clock() + EVERY
        found = self._need(self._look())
        if (found is None) == (self._reason is None):
            self._agreeing = 0
            self._reason = found and self._reason  # the first reason stands until it is over
            return self._reason
        self._agreeing += 1
        if self._agreeing >= LOOKS:
            self._reason, self._agreeing = found, 0
        return self._reason

    def _need(self, look: Look) -> str | None:
        self._swap.append(look.swap_bytes)
        if look.battery_percent is not None and look.battery_percent < self._battery:
            return f"on battery, {look.battery_percent:.0f} % left"
        if look.throttled:
            return "the processor is held back because of heat"
        if look.swap_bytes - min(self._swap) > SWAP:
            return "memory is short, the system swaps"
        if look.others > BUSY:
            return f"other programs use {look.others:.0%} of the cores"
        return None

"""Polite runs: a low priority, and pauses while the machine is short of battery, cooling or memory. No torch."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from lapclip.machine.sensors import power, throttling
from lapclip.machine.system_memory import swap_bytes

NICENESS = 10  # of 19; POSIX
READING_SECONDS = 5.0
AGREEING_READINGS = 2  # readings in a row that must agree before a run pauses or goes on
SWAP_GROWTH_BYTES = 500_000_000  # growth within the swap window that counts as too little memory
SWAP_WINDOW_READINGS = 12


def lower_priority() -> bool:
    """Lower the priority of this process and return whether that worked. It cannot be raised again."""
    with suppress(psutil.Error, OSError):
        if sys.platform == "win32":
            psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        elif sys.platform == "linux":  # threads have priorities of their own there
            for thread in psutil.Process().threads():
                with suppress(ProcessLookupError):  # it has ended since
                    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread.id))
                    os.setpriority(os.PRIO_PROCESS, thread.id, niceness)
        else:
            niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        return True
    return False


@dataclass(frozen=True)
class Reading:
    """The machine at one moment."""

    battery_percent: float | None
    """Charge of the battery. None on mains or if unknown."""
    throttled: bool | None
    """Whether the processor is slowed down because of heat. None if unknown."""
    swap_bytes: int


class MachineReader:
    """Reads the state of this machine."""

    def __init__(self) -> None:
        self._throttling = throttling()

    def __call__(self) -> Reading:
        supply = power()
        battery_percent = None
        if supply.source == "battery":
            battery_percent = supply.battery_percent
        return Reading(battery_percent, self._throttling(), swap_bytes())


class PolitePauses:
    """Decides when a polite run pauses and when it goes on."""

    def __init__(
        self,
        min_battery_percent: int,
        read: Callable[[], Reading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_battery_percent = min_battery_percent
        self._read = read or MachineReader()
        self._clock = clock
        self._swap = deque([self._read().swap_bytes], maxlen=SWAP_WINDOW_READINGS)
        self._reason: str | None = None
        self._agreeing = 0
        self._next = clock() + READING_SECONDS

    def reason(self) -> str | None:
        """Return the reason to pause now, or None. Reads the machine at most every few seconds."""
        if self._clock() < self._next:
            return self._reason
        self._next = self._clock() + READING_SECONDS
        latest = self._reason_now(self._read())
        if (latest is None) == (self._reason is None):
            self._agreeing = 0
            return self._reason
        self._agreeing += 1
        if self._agreeing >= AGREEING_READINGS:
            self._reason = latest
            self._agreeing = 0
        return self._reason

    def _reason_now(self, reading: Reading) -> str | None:
        self._swap.append(reading.swap_bytes)
        percent = reading.battery_percent
        if percent is not None and percent < self._min_battery_percent:
            return f"on battery, {percent:.0f} % left"
        if reading.throttled:
            return "the processor is held back because of heat"
        # Swap that has grown stays used. Only growth is trouble.
        if reading.swap_bytes - min(self._swap) > SWAP_GROWTH_BYTES:
            return "memory is short, the system swaps"
        return None

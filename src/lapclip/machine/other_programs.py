"""How busy other programs keep the cores: they slow down training, and make timings useless. No torch."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import NamedTuple

import psutil

BUSY_SHARE = 0.25  # of all cores; training is clearly slower beside programs that use more
WATCH_SECONDS = 0.3


def read_load(seconds: float = WATCH_SECONDS) -> float | None:
    """Return the share of all cores that is in use while this process waits. None if the system refuses."""
    try:
        return psutil.cpu_percent(interval=seconds) / 100
    except (OSError, RuntimeError):
        return None


def describe_busy_cores() -> str | None:
    """Watch the cores for a moment. Returns a warning if timings would be wrong."""
    return describe_load(read_load())


def describe_load(share: float | None) -> str | None:
    """Return a warning if other programs use too large a share of the cores for right timings."""
    if share is None or share < BUSY_SHARE:
        return None
    return f"other programs use {share:.0%} of the cores, so what is timed now is off"


def count_free_cores(busy_share: float, cores: int | None = None) -> int:
    """Return how many threads find a core of their own, of `cores` or of this computer's."""
    cores = cores or psutil.cpu_count() or 1
    return math.floor(cores * (1 - busy_share) + 0.25)  # a reading is not exact


class OtherPrograms:
    """Reads the share of all cores that other programs have used since the last reading. Does not wait.

    Child processes and their children do not count as other programs. Once they have ended, Windows does not report
    their time, and macOS only that of direct children: such a process counts as another program once.
    """

    def __init__(self) -> None:
        self._before = _read_core_seconds()

    def __call__(self) -> float | None:
        """Return the share. None if the system refuses, or if too little time has passed."""
        before, now = self._before, _read_core_seconds()
        if before is None or now is None:
            self._before = now
            return None
        passed = now.passed - before.passed
        if passed < WATCH_SECONDS * now.cores:
            return None
        self._before = now
        share = (now.others - before.others) / passed
        return min(1.0, max(0.0, share))


class CoreSeconds(NamedTuple):
    """Seconds of all cores since the system started."""

    passed: float
    others: float
    """Seconds in which the cores worked for other programs."""
    cores: int


def _read_core_seconds() -> CoreSeconds | None:
    try:
        cores = psutil.cpu_times()
        own = os.times()  # on macOS it has the time of ended children, psutil does not
        own_seconds = own.user + own.system + own.children_user + own.children_system
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = child.cpu_times()
                own_seconds += times.user + times.system
                own_seconds += times.children_user + times.children_system
        # The time of guests is part of the user's. Stolen time belongs to other virtual machines.
        passed = sum(cores) - getattr(cores, "guest", 0.0) - getattr(cores, "guest_nice", 0.0)
        idle = cores.idle + getattr(cores, "iowait", 0.0) + getattr(cores, "steal", 0.0)
        return CoreSeconds(passed, passed - idle - own_seconds, psutil.cpu_count() or 1)
    except Exception:  # systems fail in many ways; a reading never ends a run
        return None

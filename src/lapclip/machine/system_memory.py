"""The memory of this machine and of this process, and whether the system swaps because of it. No torch."""

from __future__ import annotations

import math
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lapclip.machine.facts import number_in, text_of

CGROUP = Path("/sys/fs/cgroup")

EVERY_SECONDS = 5.0
LEAST_BYTES = 1 << 30
LEAST_SHARE = 0.10
"""Swap that grows by less than this share of memory is the system tidying up."""
OWN_SHARE = 0.5
"""The process must have grown by this share of what was swapped; else another program is the cause."""


def peak_memory_bytes() -> int:
    """The most memory this process has held at once."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux" and (highest := _high_water_mark()):
        return highest
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def forget_peak() -> None:
    """Count the peak of this process from here on, where the system can (Linux)."""
    with suppress(OSError):
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")


def _high_water_mark() -> int | None:
    """Linux' own peak, which unlike that of getrusage can be forgotten."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def memory_bytes() -> int:
    """The memory this process holds now."""
    return psutil.Process().memory_info().rss


def total_bytes() -> int:
    """The memory of the machine."""
    return psutil.virtual_memory().total


def available_bytes() -> int:
    """The memory that programs can still have without swapping, inside a container's limit if there is one."""
    return int(min(psutil.virtual_memory().available, container_room(CGROUP)))


def container_room(cgroup: Path) -> float:
    """Bytes a container may still take; infinite where there is no limit."""
    limit, used = number_in(cgroup / "memory.max"), number_in(cgroup / "memory.current")
    if limit is None or used is None:
        return math.inf
    # What files left in memory counts as used, and is given up when it is needed.
    cached = re.search(
        r"^inactive_file (\d+)$", text_of(cgroup / "memory.stat") or "", flags=re.MULTILINE
    )
    return max(0, limit - used + (int(cached[1]) if cached else 0))


def swap_bytes() -> int:
    """What the system has put on disk for want of memory; 0 where it does not say."""
    try:
        return psutil.swap_memory().used
    except (OSError, RuntimeError):  # no permission, or a system that does not count it
        return 0


def held_bytes() -> int:
    """The memory this process holds, wherever the system has put it."""
    if sys.platform == "linux":
        try:
            swapped = re.search(
                r"^VmSwap:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE
            )
            return memory_bytes() + (int(swapped[1]) * 1024 if swapped else 0)
        except OSError:
            return memory_bytes()
    # What macOS compresses or swaps leaves what is held now; the peak never falls.
    return peak_memory_bytes()


class SwapWatch:
    """Whether swap has grown with this process since the watch began, asked at most every few seconds.

    The allocators of the CPU and of MPS rarely refuse: the system swaps instead, and a step that took a second takes a
    minute. Once growth has been reported, the watch begins anew.
    """

    def __init__(self) -> None:
        self._least = max(LEAST_BYTES, LEAST_SHARE * total_bytes())
        self._begin()

    def grown(self) -> int | None:
        """By how many bytes swap has grown with this process, once it is more than the system's tidying up."""
        if time.monotonic() < self._next_reading:
            return None
        self._next_reading = time.monotonic() + EVERY_SECONDS
        swapped = swap_bytes() - self._first_swap
        if swapped < self._least or held_bytes() - self._first_held < OWN_SHARE * swapped:
            return None
        self._begin()
        return swapped

    def _begin(self) -> None:
        self._first_swap, self._first_held = swap_bytes(), held_bytes()
        self._next_reading = time.monotonic() + EVERY_SECONDS

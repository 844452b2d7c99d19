"""Facts about the machine that need no torch."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lapclip.machine.ask_system import number_in, text_of

CGROUP = Path("/sys/fs/cgroup")


def machine_facts() -> dict[str, Any]:
    """What a run records about the computer it ran on. Nothing here identifies a person."""
    return {
        "chip": _chip(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": total_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def logical_cores() -> int:
    """The cores this process may use, as the system counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    cached = re.search(r"^inactive_file (\d+)$", text_of(cgroup / "memory.stat") or "", flags=re.MULTILINE)
    return max(0, limit - used + (int(cached[1]) if cached else 0))


def swap_bytes() -> int:
    """What the system has put on disk for want of memory; 0 where it does not tell."""
    try:
        return psutil.swap_memory().used
    except (OSError, RuntimeError):  # no permission, or a system without such a figure
        return 0


def held_bytes() -> int:
    """The memory this process holds, wherever the system has put it."""
    if sys.platform == "linux":
        try:
            swapped = re.search(r"^VmSwap:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
            return memory_bytes() + (int(swapped[1]) * 1024 if swapped else 0)
        except OSError:
            return memory_bytes()
    # What macOS compresses or swaps leaves the present figure; the highest one never falls.
    return peak_memory_bytes()


def source_commit() -> str | None:
    """The commit of lapclip's own source, where it runs from a clone."""
    folder = Path(__file__).parent
    try:
        command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if tracked.returncode == 0 else None


def _chip() -> str:
    """The processor's name, as the system gives it."""
    try:
        if sys.platform == "linux":
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith(("model name", "Model")):
                    return line.split(":", 1)[1].strip()
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine() or "unknown"

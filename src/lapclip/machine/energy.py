"""Joules, where the machine counts them: processors (RAPL), NVIDIA GPUs (NVML), chips by Apple (IOReport). No torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lapclip.machine.accelerators import nvidia_gpus, nvml_library
from lapclip.machine.facts import number_in, program, text_of

POWERCAP = Path("/sys/class/powercap")
MOST_WATTS = 1000.0
"""More than a counter's part of a computer draws: how soon a counter can be full."""
NOT_READ = "a counter was not read for so long that it may have started again"
Counter = Callable[[], float | None]
"""Joules counted up to now, from any start; None where it cannot be read this time."""


class Energy:
    """Joules since this object was made, by source, and the reason where a source is not known."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        counters, reasons = {}, []
        for found, reason in (_rapl(powercap), _nvidia(), _apple()):
            counters |= found
            reasons += [reason] if reason else []
        self._counters = {
            name: (counter, start) for name, counter in counters.items() if (start := counter()) is not None
        }
        self._reason = f"not measurable here: {'; '.join(reasons)}" if reasons else None

    @property
    def at_least(self) -> bool:
        """Whether more may have been used than was counted."""
        return any(isinstance(counter, Wrapping) and counter.at_least for counter, _ in self._counters.values())

    @property
    def reason(self) -> str | None:
        """Why some of it is not known."""
        missed = f"{NOT_READ}, so at least this much was used" if self.at_least else None
        return "; ".join(filter(None, (self._reason, missed))) or None

    def joules(self) -> dict[str, float] | None:
        """Joules by source, or None where no source can be read."""
        if not self._counters:
            return None
        used = {name: (counter(), start) for name, (counter, start) in self._counters.items()}
        return {name: round(now - start, 3) for name, (now, start) in used.items() if now is not None}


def of_device(joules: dict[str, float] | None, kind: str) -> float | None:
    """The joules of a computation there, or None where its device counts none.

    An accelerator's include the processor's where those are known, since it has to be fed; a processor's do not
    include an accelerator that idles.
    """
    used = {name: spent for name, spent in (joules or {}).items() if kind != "cpu" or not name.startswith("gpu")}
    own = "cpu" if kind == "cpu" else "gpu"
    return sum(used.values()) if any(name.startswith(own) for name in used) else None


class Wrapping:
    """A counter of joules that starts again at 0 when it is full, and perhaps when the machine slept.

    Right as long as it is read once in each round; where it was not, what is counted is the least that was used.
    """

    def __init__(self, read: Callable[[], float | None], full: float, clock: Callable[[], float] | None = None) -> None:
        self._read, self._full = read, full
        self._clock = clock = clock or time.time  # a monotonic clock may stand while a machine sleeps
        self._last, self._at = read(), clock()
        self._total = self._last or 0.0
        self.at_least = False

    def __call__(self) -> float | None:
        """The count as if it never started again."""
        now, at = self._read(), self._clock()
        if now is None or self._last is None:
            return None
        most = MOST_WATTS * max(1.0, at - self._at)  # a clock may be set back
        used = now - self._last
        if used < 0:
            used += self._full
            if used > most:  # nothing draws that much: it began again before it was full
                used, self.at_least = now, True
        self.at_least |= used + self._full <= most  # there was time for another round
        self._total, self._last, self._at = self._total + used, now, at
        return self._total


def _rapl(powercap: Path) -> tuple[dict[str, Counter], str | None]:
    """Linux' counters of the processor's packages and of memory; cores and graphics are parts of a package."""
    if sys.platform != "linux" and powercap == POWERCAP:
        return {}, None
    zones = {path: text_of(path / "name") or "" for path in sorted(powercap.glob("intel-rapl:*"))}
    zones = {path: name for path, name in zones.items() if name.startswith(("package", "dram"))}
    if not zones:
        return {}, "the system shows no energy counters of the processor (RAPL)"
    counters: dict[str, Counter] = {}
    for path, name in zones.items():
        if number_in(path / "energy_uj") is None:
            continue
        source = f"cpu {name}" if f"cpu {name}" not in counters else f"cpu {name} {path.name.partition(':')[2]}"
        counters[source] = _microjoules(path)
    if not counters:
        path = next(iter(zones)) / "energy_uj"
        fault = "cannot be read" if os.access(path, os.R_OK) else "may be read by root only"
        return {}, f"{path} {fault}"
    return counters, None


def _microjoules(zone: Path) -> Wrapping:
    def read() -> float | None:
        return None if (now := number_in(zone / "energy_uj")) is None else now / 1e6

    return Wrapping(read, (number_in(zone / "max_energy_range_uj") or 2**32) / 1e6)


def _nvidia() -> tuple[dict[str, Counter], str | None]:
    """NVIDIA's counters; without its driver there is nothing to give a reason for."""
    found = nvidia_gpus()
    if not found:
        return {}, nvml_library()[1] if program("nvidia-smi") else None
    counters: dict[str, Counter] = {
        f"gpu {gpu.index}": lambda gpu=gpu: gpu.joules for gpu in found if gpu.joules is not None
    }
    return counters, None if counters else "the GPU counts no energy"


def _apple() -> tuple[dict[str, Counter], str | None]:
    """By zeus-apple-silicon, which asks IOReport without root."""
    if sys.platform != "darwin":
        return {}, None
    try:
        from zeus_apple_silicon import AppleEnergyMonitor  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}, "the package zeus-apple-silicon is not installed"
    try:
        return apple_counters(AppleEnergyMonitor()), None
    except Exception as error:  # a library of another language: its errors have no common kind
        return {}, f"IOReport does not answer ({error})"


def apple_counters(monitor) -> dict[str, Counter]:
    """The parts of the chip that the monitor counts, in millijoules there."""
    parts = {"cpu": "cpu_total_mj", "gpu": "gpu_mj", "neural engine": "ane_mj", "dram": "dram_mj"}

    def counter(field: str) -> Counter:
        def read() -> float | None:
            millijoules = getattr(monitor.get_cumulative_energy(), field, None)
            return None if millijoules is None else millijoules / 1000

        return read

    return {part: counter(field) for part, field in parts.items()}

"""Sensors of the machine: temperature, clock rate, throttling, and all that a run records while it trains. No torch.

Each takes well under a millisecond. The files to read are found once: asking every sensor of a laptop can take a tenth
of a second.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from lapclip.machine.accelerators import nvidia_gpus
from lapclip.machine.energy import Energy
from lapclip.machine.facts import number_in, output_of, text_of
from lapclip.machine.system_memory import swap_bytes

SYSFS = Path("/sys")
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "fam15h_power")
"""Drivers of the processor's own sensors, as hwmon names them."""
PROCESSOR_ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal", "TCPU", "acpitz")
WHOLE_CHIP = ("Package id", "Tctl", "Tdie")
FEW_POLICIES = 8
"""Clock rates read at most, so that a machine of many cores costs no more."""
HEAVY = 2
"""macOS' thermal pressure: 0 nominal, 1 moderate, 2 heavy (the clock is held back), 3 trapping, 4 sleeping."""
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
    at_least: bool = False
    """Whether more joules may have been used than were counted."""


class Sensors:
    """Reads the sensors of this machine, each found once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._counted = clock()
        self._energy = Energy()
        self._temperature, self._megahertz, self._throttling = thermometer(), processor_clock(), throttling()
        self._gpus = nvidia_gpus()
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
            swap_bytes=swap_bytes(),
            throttled=any(throttled) if any(known is not None for known in throttled) else None,
            reason=self._energy.reason,
            at_least=self._energy.at_least,
        )

    def keep_counting(self) -> None:
        """Read the counters of energy, which start again when they are full, while there is nothing to record."""
        if self._clock() - self._counted >= EVERY_SECONDS:
            self._counted = self._clock()
            self._energy.joules()


def thermometer(sysfs: Path = SYSFS) -> Callable[[], float | None]:
    """Reads the processor's temperature in degrees Celsius. macOS and Windows show it to administrators only."""
    path = _hwmon(sysfs) or _zone(sysfs)

    def read() -> float | None:
        thousandths = number_in(path) if path else None
        return None if thousandths is None else thousandths / 1000

    return read


def processor_clock(sysfs: Path = SYSFS) -> Callable[[], float | None]:
    """Reads the clock rate now in megahertz, the mean over some cores. macOS and Windows show the nominal one only."""
    paths = sorted((sysfs / "devices/system/cpu/cpufreq").glob("policy*/scaling_cur_freq"))[:FEW_POLICIES]

    def read() -> float | None:
        rates = [rate for path in paths if (rate := number_in(path)) is not None]
        if not rates and sysfs == SYSFS and sys.platform == "linux":
            return parse_clock(_beginning(Path("/proc/cpuinfo")))
        return sum(rates) / len(rates) / 1000 if rates else None

    return read


def _beginning(path: Path) -> str:
    """The first cores' part: the system writes this file while it is read, and asks every core it comes to."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(2**14)
    except OSError:
        return ""


def parse_clock(cpuinfo: str) -> float | None:
    """The mean of what /proc/cpuinfo says, for machines without a frequency driver."""
    rates = [float(rate) for rate in re.findall(r"^cpu MHz\s*: ([\d.]+)$", cpuinfo, flags=re.MULTILINE)]
    return sum(rates) / len(rates) if rates else None


def throttling(sysfs: Path = SYSFS) -> Callable[[], bool | None]:
    """Reads whether the processor is held back because of heat: since the last reading on Linux, now on macOS."""
    if sys.platform == "darwin":
        return _apple_throttling
    # Counters that Intel's processors keep; other makers' have none.
    pattern = "cpu[0-9]*/thermal_throttle/*_throttle_count"
    paths = sorted((sysfs / "devices/system/cpu").glob(pattern))[: 2 * FEW_POLICIES]
    before = _counts(paths)

    def read() -> bool | None:
        nonlocal before
        now = _counts(paths)
        grown = any(count > before.get(path, count) for path, count in now.items())
        before = now
        return grown if now else None

    return read


def _counts(paths: list[Path]) -> dict[Path, int]:
    return {path: count for path in paths if (count := number_in(path)) is not None}


def _hwmon(sysfs: Path) -> Path | None:
    """The sensor of the whole chip, or else the first of the processor's."""
    for folder in sorted((sysfs / "class/hwmon").glob("hwmon*")):
        inputs = sorted(folder.glob("temp*_input"))
        if not inputs or text_of(folder / "name") not in PROCESSOR_SENSORS:
            continue
        for path in inputs:
            label = text_of(path.with_name(path.name.replace("_input", "_label"))) or ""
            if label.startswith(WHOLE_CHIP):
                return path
        return inputs[0]
    return None


def _zone(sysfs: Path) -> Path | None:
    zones = {text_of(path / "type"): path / "temp" for path in (sysfs / "class/thermal").glob("thermal_zone*")}
    return next((zones[name] for name in PROCESSOR_ZONES if name in zones), None)


def _apple_throttling() -> bool | None:
    """The thermal pressure that the system publishes to every program, else what pmset says of the clock."""
    pressure = _apple_pressure()
    if pressure is not None:
        return pressure >= HEAVY
    return parse_thermal_limit(output_of("pmset", "-g", "therm") or "")


def _apple_pressure() -> int | None:
    """By notify(3), as the program MacThrottle does (github.com/angristan/MacThrottle)."""
    try:
        library = ctypes.CDLL("/usr/lib/libSystem.dylib")
        token, state = ctypes.c_int(0), ctypes.c_uint64(0)
        name = b"com.apple.system.thermalpressurelevel"
        if library.notify_register_check(name, ctypes.byref(token)):
            return None
        failed = library.notify_get_state(token, ctypes.byref(state))
        library.notify_cancel(token)
        return None if failed else int(state.value)
    except (OSError, AttributeError):
        return None


def parse_thermal_limit(text: str) -> bool | None:
    """Whether macOS' `pmset -g therm` holds the clock back. Chips by Apple often record nothing: then it is unknown."""
    limits = [int(limit) for limit in re.findall(r"CPU_(?:Speed|Scheduler)_Limit\s*=\s*(\d+)", text)]
    return min(limits) < 100 if limits else None

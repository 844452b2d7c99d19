"""Sensors of the machine: temperature, clock rate, throttling, where the power comes from, and all that a run records
while it trains. No torch.

Joules come from where the machine counts them: processors (RAPL), NVIDIA GPUs (NVML), chips by Apple (IOReport).

Each takes well under a millisecond. The files to read are found once: asking every sensor of a laptop can take a tenth
of a second.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from lapclip.machine.facts import number_in, nvidia_gpus, nvml_library, output_of, program, text_of
from lapclip.machine.other_programs import OtherPrograms
from lapclip.machine.system_memory import swap_bytes

SYSFS = Path("/sys")
PROCESSOR_SENSORS = (
    "coretemp",
    "k10temp",
    "zenpower",
    "cpu_thermal",
    "cpu-thermal",
    "soc_thermal",
    "fam15h_power",
)
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
    others: float | None = None
    """Share of all cores that other programs used since the sample before, or since a pause."""


class Sensors:
    """Reads the sensors of this machine, each found once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._counted = clock()
        self._energy = Energy()
        self._temperature, self._megahertz, self._throttling = (
            thermometer(),
            processor_clock(),
            throttling(),
        )
        self._gpus, self._others = nvidia_gpus(), OtherPrograms()
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
            others=None if (others := self._others()) is None else round(others, 4),
        )

    def keep_counting(self) -> None:
        """Read the counters of energy, which start again when they are full, while there is nothing to record; what
        others do meanwhile disturbs nobody."""
        self._others()
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
    """Return a reader of the clock rate now in megahertz, the mean over some cores.

    macOS and Windows show only the nominal rate.
    """
    pattern = "devices/system/cpu/cpufreq/policy*/scaling_cur_freq"
    paths = sorted(sysfs.glob(pattern))[:FEW_POLICIES]

    def read() -> float | None:
        rates = [rate for rate in map(number_in, paths) if rate is not None]
        return sum(rates) / len(rates) / 1000 if rates else None

    return read


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
    zones = {
        text_of(path / "type"): path / "temp"
        for path in (sysfs / "class/thermal").glob("thermal_zone*")
    }
    return next((zones[name] for name in PROCESSOR_ZONES if name in zones), None)


def _apple_throttling() -> bool | None:
    """Return whether the thermal pressure that macOS publishes to every program is heavy."""
    pressure = _apple_pressure()
    return None if pressure is None else pressure >= HEAVY


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
            name: (counter, start)
            for name, counter in counters.items()
            if (start := counter()) is not None
        }
        self._reason = f"not measurable here: {'; '.join(reasons)}" if reasons else None

    @property
    def at_least(self) -> bool:
        """Whether more may have been used than was counted."""
        return any(
            isinstance(counter, Wrapping) and counter.at_least
            for counter, _ in self._counters.values()
        )

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
        return {
            name: round(now - start, 3) for name, (now, start) in used.items() if now is not None
        }


def of_device(joules: dict[str, float] | None, kind: str) -> float | None:
    """The joules of a computation there, or None where its device counts none.

    An accelerator's include the processor's where those are known, since it has to be fed; a processor's do not
    include an accelerator that idles.
    """
    used = {
        name: spent
        for name, spent in (joules or {}).items()
        if kind != "cpu" or not name.startswith("gpu")
    }
    own = "cpu" if kind == "cpu" else "gpu"
    return sum(used.values()) if any(name.startswith(own) for name in used) else None


class Wrapping:
    """A counter of joules that starts again at 0 when it is full, and perhaps when the machine slept.

    Right as long as it is read once in each round; where it was not, what is counted is the least that was used.
    """

    def __init__(
        self,
        read: Callable[[], float | None],
        full: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._read, self._full = read, full
        self._clock = clock = (
            clock or time.time
        )  # a monotonic clock may stand while a machine sleeps
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
        source = (
            f"cpu {name}"
            if f"cpu {name}" not in counters
            else f"cpu {name} {path.name.partition(':')[2]}"
        )
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


@dataclass(frozen=True)
class Power:
    """What the system tells; None is unknown."""

    source: str | None
    """`battery` or `mains`."""
    battery_percent: float | None
    low_power_mode: bool | None


def power() -> Power:
    """Return the power source, the battery and the low-power mode of this machine."""
    source, percent = _battery()
    low_power_mode = None
    if sys.platform == "darwin":
        low_power_mode = parse_low_power_mode(output_of("pmset", "-g") or "")
    elif sys.platform == "linux":
        low_power_mode = linux_low_power_mode(SYSFS)
    return Power(source, percent, low_power_mode)


def _battery() -> tuple[str | None, float | None]:
    """Return the power source and the charge. Both are None without a battery."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None, None
    if battery is None:
        return None, None
    source = {True: "mains", False: "battery"}.get(battery.power_plugged)
    return source, float(battery.percent)


def parse_low_power_mode(text: str) -> bool | None:
    """From macOS' `pmset -g`. Newer systems say `powermode`: 0 automatic, 1 low, 2 high."""
    found = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", text, flags=re.MULTILINE)
    return found[1] == "1" if found else None


def linux_low_power_mode(sysfs: Path) -> bool | None:
    """The firmware's profile where there is one, else what the frequency driver prefers."""
    if profile := text_of(sysfs / "firmware/acpi/platform_profile"):
        return profile in ("low-power", "quiet", "cool")
    preference = text_of(sysfs / "devices/system/cpu/cpu0/cpufreq/energy_performance_preference")
    return preference == "power" if preference else None

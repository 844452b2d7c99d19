"""Where the power comes from, and whether the system saves it. No torch."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from lapclip.machine.facts import number_in, output_of, text_of

SYSFS = Path("/sys")
POWER_SAVER = "a1841308-3541-4fab-bc81-f71556f20b4a"
"""Windows' power scheme "Power saver"; the identifier is the same in every language."""


@dataclass(frozen=True)
class Power:
    """What the system tells; None is unknown."""

    source: str | None
    """`battery` or `mains`."""
    battery_percent: float | None
    low_power_mode: bool | None


def power() -> Power:
    """Power source, battery and low-power mode of this machine."""
    source, percent = _battery()
    if sys.platform == "darwin":
        source = source or parse_power_source(output_of("pmset", "-g", "batt") or "")
        return Power(source, percent, parse_low_power_mode(output_of("pmset", "-g") or ""))
    if sys.platform == "win32":
        status = _windows_status()
        scheme = parse_power_scheme(output_of("powercfg", "/getactivescheme") or "")
        saver = parse_power_status(status)[1]
        low = None if saver is None and scheme is None else bool(saver or scheme)
        return Power(source or parse_power_status(status)[0], percent, low)
    return Power(source or linux_power_source(SYSFS), percent, linux_low_power_mode(SYSFS))


def _battery() -> tuple[str | None, float | None]:
    """As psutil has it on every system; without a battery it says nothing."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None, None
    if battery is None:
        return None, None
    source = None if battery.power_plugged is None else "mains" if battery.power_plugged else "battery"
    return source, float(battery.percent)


def parse_power_source(text: str) -> str | None:
    """From macOS' `pmset -g batt`, which names the source on machines without a battery too."""
    found = re.search(r"Now drawing from '(AC|Battery|UPS) Power'", text)
    return {"AC": "mains", "Battery": "battery", "UPS": "battery"}[found[1]] if found else None


def parse_low_power_mode(text: str) -> bool | None:
    """From macOS' `pmset -g`. Newer systems say `powermode`: 0 automatic, 1 low, 2 high."""
    found = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", text, flags=re.MULTILINE)
    return found[1] == "1" if found else None


def linux_power_source(sysfs: Path) -> str | None:
    """Mains if any supply of that kind is on. A list without one tells nothing: desktops and containers have none."""
    for supply in sorted((sysfs / "class/power_supply").glob("*")):
        if text_of(supply / "type") in ("Mains", "USB") and number_in(supply / "online") == 1:
            return "mains"
    return None


def linux_low_power_mode(sysfs: Path) -> bool | None:
    """The firmware's profile where there is one, else what the frequency driver prefers."""
    if profile := text_of(sysfs / "firmware/acpi/platform_profile"):
        return profile in ("low-power", "quiet", "cool")
    preference = text_of(sysfs / "devices/system/cpu/cpu0/cpufreq/energy_performance_preference")
    return preference == "power" if preference else None


def parse_power_status(status: bytes) -> tuple[str | None, bool | None]:
    """Source and battery saver from Windows' SYSTEM_POWER_STATUS: bytes 0 (AC line) and 3 (battery saver)."""
    if len(status) < 12:
        return None, None
    return {0: "battery", 1: "mains"}.get(status[0]), bool(status[3])


def parse_power_scheme(text: str) -> bool | None:
    """Whether Windows' `powercfg /getactivescheme` names the power saver."""
    found = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", text.lower())
    return found[0] == POWER_SAVER if found else None


def _windows_status() -> bytes:
    try:
        buffer = ctypes.create_string_buffer(12)
        done = ctypes.windll.kernel32.GetSystemPowerStatus(buffer)  # pyright: ignore[reportAttributeAccessIssue]
        return buffer.raw if done else b""
    except (AttributeError, OSError):
        return b""

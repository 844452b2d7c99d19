"""Power, from what each system prints. The samples are written after the systems' documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.machine import sensors

from .test_facts import write

BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)	78%; discharging; 5:12 remaining present: true
"""
MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=4653155)	100%; charged; 0:00 remaining present: true
"""
SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 powernap             1
 displaysleep         10
 lowpowermode         {mode}
 womp                 1
"""
STATUS = bytes([1, 8, 76, 0]) + (3600).to_bytes(4, "little") + b"\xff\xff\xff\xff"


def test_macos_names_the_source() -> None:
    assert sensors.parse_power_source(BATTERY) == "battery"
    assert sensors.parse_power_source(MAINS) == "mains"
    assert (
        sensors.parse_power_source("Now drawing from 'AC Power'\n") == "mains"
    )  # a Mac mini has no battery
    assert sensors.parse_power_source("") is None


@pytest.mark.parametrize(("mode", "low"), [("0", False), ("1", True)])
def test_macos_low_power_mode(mode: str, low: bool) -> None:
    assert sensors.parse_low_power_mode(SETTINGS.format(mode=mode)) is low
    assert sensors.parse_low_power_mode(f" powermode            {mode}\n") is low


def test_macos_high_power_is_not_low_power() -> None:
    assert sensors.parse_low_power_mode(" powermode            2\n") is False
    assert sensors.parse_low_power_mode(" displaysleep 10\n") is None


def test_linux_names_mains_and_otherwise_nothing(tmp_path: Path) -> None:
    assert sensors.linux_power_source(tmp_path) is None
    write(tmp_path, {"class/power_supply/AC/type": "Mains", "class/power_supply/AC/online": "0"})
    assert sensors.linux_power_source(tmp_path) is None
    write(tmp_path, {"class/power_supply/AC/online": "1"})
    assert sensors.linux_power_source(tmp_path) == "mains"


def test_linux_profiles(tmp_path: Path) -> None:
    assert sensors.linux_low_power_mode(tmp_path) is None
    write(tmp_path, {"devices/system/cpu/cpu0/cpufreq/energy_performance_preference": "power"})
    assert sensors.linux_low_power_mode(tmp_path) is True
    write(
        tmp_path, {"firmware/acpi/platform_profile": "balanced"}
    )  # the firmware's word counts for more
    assert sensors.linux_low_power_mode(tmp_path) is False
    write(tmp_path, {"firmware/acpi/platform_profile": "low-power"})
    assert sensors.linux_low_power_mode(tmp_path) is True


def test_windows_status_and_scheme() -> None:
    assert sensors.parse_power_status(STATUS) == ("mains", False)
    assert sensors.parse_power_status(bytes([0, 0, 40, 1]) + bytes(8)) == ("battery", True)
    assert sensors.parse_power_status(bytes([255]) + bytes(11)) == (None, False)
    assert sensors.parse_power_status(b"") == (None, None)
    saver = "GUID des Energieschemas: a1841308-3541-4fab-bc81-f71556f20b4a  (Energiesparmodus)\r\n"
    balanced = "Power Scheme GUID: 381b4222-f694-41f0-9685-ff5bb260df2e  (Balanced)\r\n"
    assert sensors.parse_power_scheme(saver) is True
    assert sensors.parse_power_scheme(balanced) is False
    assert sensors.parse_power_scheme("") is None


def test_this_machine_answers_without_raising() -> None:
    assert sensors.power().source in ("mains", "battery", None)

"""Power, from what each system prints. The samples are written after the systems' documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.machine import sensors

from .test_facts import write

SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 powernap             1
 displaysleep         10
 lowpowermode         {mode}
 womp                 1
"""


@pytest.mark.parametrize(("mode", "low"), [("0", False), ("1", True)])
def test_macos_low_power_mode(mode: str, low: bool) -> None:
    assert sensors.parse_low_power_mode(SETTINGS.format(mode=mode)) is low
    assert sensors.parse_low_power_mode(f" powermode            {mode}\n") is low


def test_macos_high_power_is_not_low_power() -> None:
    assert sensors.parse_low_power_mode(" powermode            2\n") is False
    assert sensors.parse_low_power_mode(" displaysleep 10\n") is None


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


def test_this_machine_answers_without_raising() -> None:
    assert sensors.power().source in ("mains", "battery", None)

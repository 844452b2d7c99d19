from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.machine import sensors
from lapclip.machine.other_programs import OtherPrograms
from lapclip.machine.sensors import EVERY_SECONDS, Sensors

from .test_facts import write


def test_the_whole_chip_is_read_and_not_a_disk(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "class/hwmon/hwmon0/name": "nvme",
            "class/hwmon/hwmon0/temp1_input": "33000",
            "class/hwmon/hwmon1/name": "coretemp",
            "class/hwmon/hwmon1/temp1_label": "Core 0",
            "class/hwmon/hwmon1/temp1_input": "61000",
            "class/hwmon/hwmon1/temp2_label": "Package id 0",
            "class/hwmon/hwmon1/temp2_input": "72500",
        },
    )
    read = sensors.thermometer(tmp_path)
    assert read() == 72.5
    write(tmp_path, {"class/hwmon/hwmon1/temp2_input": "80000"})
    assert read() == 80
    (tmp_path / "class/hwmon/hwmon1/temp2_input").unlink()
    assert read() is None


def test_a_thermal_zone_will_do(tmp_path: Path) -> None:
    assert sensors.thermometer(tmp_path)() is None
    write(
        tmp_path,
        {
            "class/thermal/thermal_zone0/type": "iwlwifi",
            "class/thermal/thermal_zone0/temp": "40000",
        },
    )
    assert sensors.thermometer(tmp_path)() is None
    write(
        tmp_path,
        {
            "class/thermal/thermal_zone1/type": "cpu-thermal",
            "class/thermal/thermal_zone1/temp": "55000",
        },
    )
    assert sensors.thermometer(tmp_path)() == 55


def test_the_clock_is_the_mean_of_the_cores(tmp_path: Path) -> None:
    assert sensors.processor_clock(tmp_path)() is None
    cpufreq = "devices/system/cpu/cpufreq/policy{}/scaling_cur_freq"
    write(tmp_path, {cpufreq.format(0): "3000000", cpufreq.format(1): "2000000"})
    assert sensors.processor_clock(tmp_path)() == 2500


@pytest.mark.skipif("sys.platform == 'darwin'", reason="macOS publishes a pressure instead")
def test_counters_that_grow_mean_throttling(tmp_path: Path) -> None:
    assert sensors.throttling(tmp_path)() is None
    name = "devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"
    write(tmp_path, {name: "7"})
    read = sensors.throttling(tmp_path)
    assert read() is False  # it was throttled once, before we looked
    write(tmp_path, {name: "9"})
    assert read() is True
    assert read() is False


def test_sensors_are_due_at_once_and_then_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OtherPrograms, "__call__", lambda self: 0.33333)
    now = 0.0
    sensors = Sensors(clock=lambda: now)
    assert sensors.due()
    sample = sensors.sample()
    assert all(0 <= share <= 1 for share in sample.core_use)
    assert len(sample.core_use) >= 1
    assert sample.others == 0.3333
    assert sample.swap_bytes >= 0
    assert sample.joules is not None or sample.reason is not None
    now = EVERY_SECONDS - 0.1
    assert not sensors.due()
    now = EVERY_SECONDS
    assert sensors.due()

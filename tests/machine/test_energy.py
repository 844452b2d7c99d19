from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from lapclip.machine import sensors
from lapclip.machine.sensors import Energy, Wrapping, apple_counters, of_device

from .test_facts import write

FULL = 262_143_328_850


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU of this computer uses is no part of what these tests count."""
    monkeypatch.setattr(sensors, "_nvidia", lambda: ({}, None))


def zones(root: Path, package: int, dram: int) -> Path:
    return write(
        root,
        {
            "intel-rapl:0/name": "package-0",
            "intel-rapl:0/energy_uj": str(package),
            "intel-rapl:0/max_energy_range_uj": str(FULL),
            "intel-rapl:0:0/name": "core",
            "intel-rapl:0:0/energy_uj": "1",
            "intel-rapl:0:1/name": "dram",
            "intel-rapl:0:1/energy_uj": str(dram),
            "intel-rapl:0:1/max_energy_range_uj": str(FULL),
        },
    )


def test_joules_are_counted_from_the_start_and_parts_are_not_counted_twice(tmp_path: Path) -> None:
    energy = Energy(zones(tmp_path, 5_000_000, 100))
    assert energy.reason is None
    zones(tmp_path, 47_000_000, 2_000_100)
    assert energy.joules() == {"cpu package-0": 42.0, "cpu dram": 2.0}


def test_a_counter_that_starts_again_goes_on_counting(tmp_path: Path) -> None:
    energy = Energy(zones(tmp_path, FULL - 1_000_000, 0))
    zones(tmp_path, 2_000_000, 0)
    assert energy.joules() == {"cpu package-0": 3.0, "cpu dram": 0.0}
    zones(tmp_path, FULL - 1, 0)
    energy.joules()
    zones(tmp_path, 1_000_000, 0)
    used = energy.joules()
    assert used is not None
    assert used["cpu package-0"] == pytest.approx(2 + FULL / 1e6, abs=1e-3)


def test_a_counter_that_vanishes_says_nothing() -> None:
    readings = iter([10, None, 12])
    count = Wrapping(lambda: next(readings), 100)
    assert count() is None
    assert count() == 12


@pytest.mark.parametrize(
    ("seconds", "counted", "used", "at_least"),
    [
        (60, 90_000, 50_000, False),
        (95, 30_000, 90_000, False),  # full, and started again
        (3600, 90_000, 50_000, True),  # it may have been full any number of times
        (3600, 30_000, 90_000, True),
        (
            10,
            30_000,
            30_000,
            True,
        ),  # nothing draws 9 kW: it started again before it was full, as after a sleep
    ],
)
def test_a_counter_that_may_have_been_full_unseen_says_at_least(
    seconds: float, counted: float, used: float, at_least: bool
) -> None:
    """At 1 kW it takes 100 seconds to be full."""
    readings, times = iter([40_000.0, counted]), iter([0.0, seconds])
    count = Wrapping(lambda: next(readings), 100_000, lambda: next(times))
    assert count() == 40_000 + used
    assert count.at_least == at_least


def test_energy_that_may_be_more_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lapclip.machine.sensors.time.time", lambda: now)
    energy = Energy(zones(tmp_path, 5_000_000, 100))
    energy.joules()
    assert not energy.at_least
    now = 7200.0
    assert energy.joules() == {"cpu package-0": 0.0, "cpu dram": 0.0}
    assert energy.at_least
    assert energy.reason is not None
    assert "at least" in energy.reason


def test_without_counters_there_is_a_reason(tmp_path: Path) -> None:
    energy = Energy(tmp_path)
    assert energy.joules() is None
    assert energy.reason is not None
    assert energy.reason.startswith("not measurable here: the system shows no energy counters")


@pytest.mark.skipif("sys.platform == 'win32'", reason="Windows has no such permissions")
def test_no_permission_is_a_reason_and_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zones(tmp_path, 1, 1)
    for path in tmp_path.glob("*/energy_uj"):
        path.chmod(0)
    if os.geteuid() == 0:  # root reads everything, so the refusal is made here
        real = Path.read_text

        def refused(path: Path, *arguments, **options) -> str:
            if path.name == "energy_uj":
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", refused)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    energy = Energy(tmp_path)
    assert energy.joules() is None
    assert energy.reason is not None
    assert "energy_uj may be read by root only" in energy.reason


def test_parts_of_a_chip_by_apple_are_counted_in_millijoules() -> None:
    @dataclass
    class Metrics:
        cpu_total_mj: int
        gpu_mj: int
        ane_mj: int | None = None

    class Monitor:
        def get_cumulative_energy(self) -> Metrics:
            return Metrics(5_000, 250)

    read = {part: counter() for part, counter in apple_counters(Monitor()).items()}
    assert read == {"cpu": 5.0, "gpu": 0.25, "neural engine": None, "dram": None}


@pytest.mark.parametrize(
    ("joules", "kind", "expected"),
    [
        (None, "cpu", None),
        ({"gpu 0": 5.0}, "cpu", None),
        ({"gpu 0": 5.0}, "cuda", 5.0),
        ({"cpu package-0": 2.0, "gpu 0": 5.0}, "cpu", 2.0),
        ({"cpu package-0": 2.0, "gpu 0": 5.0}, "cuda", 7.0),
        ({"cpu package-0": 2.0}, "cuda", None),
        ({"cpu": 1.0, "gpu": 2.0, "dram": 0.5}, "mps", 3.5),
        ({"cpu": 1.0, "gpu": 2.0, "dram": 0.5}, "cpu", 1.5),
    ],
)
def test_a_device_has_its_own_joules_or_none(
    joules: dict | None, kind: str, expected: float | None
) -> None:
    assert of_device(joules, kind) == expected

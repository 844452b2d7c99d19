"""Accelerators, from what each system prints. The samples are written after the programs' documentation."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from lapclip.machine.facts import (
    accelerators,
    nvidia_gpus,
    nvml_library,
    parse_nvidia_smi,
)
from lapclip.machine.sensors import Energy, Sensors

SMI = "NVIDIA GeForce RTX 4070 Laptop GPU, 8188, 7621, 560.35.03\nNVIDIA T500, [N/A], [N/A], 560.35.03\n"


def test_nvidia_smi_rows() -> None:
    first, second = parse_nvidia_smi(SMI)
    assert first == {
        "kind": "cuda",
        "name": "NVIDIA GeForce RTX 4070 Laptop GPU",
        "memory_bytes": 8188 * 2**20,
        "free_bytes": 7621 * 2**20,
        "shares_memory": False,
        "driver": "560.35.03",
    }
    assert second["memory_bytes"] is None
    assert (
        parse_nvidia_smi(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
        )
        == []
    )


@pytest.mark.parametrize(("architecture", "kinds"), [("arm64", ["mps"]), ("x86_64", [])])
def test_macs_with_a_chip_by_apple_have_its_gpu(
    monkeypatch: pytest.MonkeyPatch, architecture: str, kinds: list[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: architecture)
    assert [found["kind"] for found in accelerators()] == kinds


def test_this_machine_answers_without_raising() -> None:
    assert isinstance(accelerators(), list)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    nvml_library.cache_clear()
    yield
    nvml_library.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, **changes) -> types.ModuleType:
    """A library with one card, as nvidia-ml-py gives it."""
    module = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    module.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetTemperature=lambda card, sensor: 61,
        nvmlDeviceGetTotalEnergyConsumption=lambda card: 5_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x40,
        **changes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_card_counts_joules_heat_and_throttling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = pretend(monkeypatch)
    energy, sensors = Energy(tmp_path), Sensors()
    module.__dict__["nvmlDeviceGetTotalEnergyConsumption"] = lambda card: 12_500
    assert energy.joules() == {"gpu 0": 7.5}
    assert energy.reason is not None  # the processor's energy is still unknown
    sample = sensors.sample()
    assert sample.joules is not None
    assert sample.joules["gpu 0"] == 7.5
    assert sample.celsius is not None
    assert sample.celsius >= 61
    assert sample.throttled is True


def test_power_capping_is_not_throttling_because_of_heat(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pretend(monkeypatch)
    module.__dict__["nvmlDeviceGetCurrentClocksThrottleReasons"] = lambda card: 0x04
    (card,) = nvidia_gpus()
    assert card.throttled is False


def test_what_a_card_does_not_know_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = pretend(monkeypatch)

    def unsupported(*_):
        raise module.NVMLError("Not Supported")

    for name in (
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetTemperature",
    ):
        module.__dict__[name] = unsupported
    (card,) = nvidia_gpus()
    assert card.joules is None
    assert card.celsius is None
    energy = Energy(tmp_path)
    assert energy.joules() is None
    assert "the GPU counts no energy" in (energy.reason or "")


def test_no_driver_and_no_package_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pretend(monkeypatch)

    def fails():
        raise module.NVMLError("Driver Not Loaded")

    module.__dict__["nvmlInit"] = fails
    assert nvidia_gpus() == []
    assert nvml_library() == (None, "no NVIDIA driver answers (Driver Not Loaded)")
    nvml_library.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_library() == (None, "the package nvidia-ml-py is not installed")

"""Accelerators, from what each system prints. The samples are written after the programs' documentation."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from lapclip.machine.facts import (
    accelerators,
    nvidia_driver,
    nvidia_gpus,
    nvml_library,
    parse_nvidia_smi,
    parse_system_profiler,
)
from lapclip.machine.sensors import Energy, Sensors

SMI = "NVIDIA GeForce RTX 4070 Laptop GPU, 8188, 7621, 560.35.03\nNVIDIA T500, [N/A], [N/A], 560.35.03\n"
M1 = """{"SPDisplaysDataType": [{"_name": "kHW_AppleM1Item", "spdisplays_mtlgpufamilysupport": "spdisplays_metal4",
"spdisplays_ndrvs": [{"_name": "Color LCD"}], "spdisplays_vendor": "sppci_vendor_Apple",
"sppci_cores": "8", "sppci_device_type": "spdisplays_gpu", "sppci_model": "Apple M1"}]}"""


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


def test_macos_gpus() -> None:
    (gpu,) = parse_system_profiler(M1)
    assert gpu["kind"] == "mps"
    assert gpu["name"] == "Apple M1, 8 GPU cores"
    assert gpu["driver"] == "Metal 4"
    assert gpu["shares_memory"] is True
    assert gpu["memory_bytes"] is None
    assert parse_system_profiler("") == []
    assert parse_system_profiler("[]") == []


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
        nvmlDeviceGetName=lambda card: b"A Card",
        nvmlDeviceGetMemoryInfo=lambda card: types.SimpleNamespace(total=8 * 2**30, free=7 * 2**30),
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetTemperature=lambda card, sensor: 61,
        nvmlDeviceGetTotalEnergyConsumption=lambda card: 5_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x40,
        **changes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.skipif("sys.platform == 'darwin'", reason="macOS asks system_profiler")
def test_a_card_is_listed_with_its_memory_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    (card,) = accelerators()
    assert card == {
        "kind": "cuda",
        "name": "A Card",
        "memory_bytes": 8 * 2**30,
        "free_bytes": 7 * 2**30,
        "shares_memory": False,
        "driver": "570.1",
    }


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
        "nvmlDeviceGetMemoryInfo",
    ):
        module.__dict__[name] = unsupported
    (card,) = nvidia_gpus()
    assert card.joules is None
    assert card.celsius is None
    assert card.memory == (None, None)
    energy = Energy(tmp_path)
    assert energy.joules() is None
    assert "the GPU counts no energy" in (energy.reason or "")


def test_no_driver_and_no_package_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pretend(monkeypatch)

    def fails():
        raise module.NVMLError("Driver Not Loaded")

    module.__dict__["nvmlInit"] = fails
    assert nvidia_gpus() == []
    assert nvidia_driver() is None
    assert nvml_library() == (None, "no NVIDIA driver answers (Driver Not Loaded)")
    nvml_library.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_library() == (None, "the package nvidia-ml-py is not installed")

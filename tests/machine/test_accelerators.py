"""Accelerators, from what each system prints. The samples are written after the programs' documentation."""

from __future__ import annotations

from lapclip.machine.accelerators import accelerators, parse_nvidia_smi, parse_system_profiler

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
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []


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

"""Cores and features, from what each system prints. The samples are written after the systems' documentation."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from lapclip.machine import facts

M1 = """hw.ncpu: 8
hw.physicalcpu: 8
hw.nperflevels: 2
hw.perflevel0.physicalcpu: 4
hw.perflevel0.name: Performance
hw.perflevel1.physicalcpu: 4
hw.perflevel1.name: Efficiency
hw.optional.AdvSIMD: 1
hw.optional.neon: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_SME: 0
"""
M4 = """hw.perflevel0.physicalcpu: 4
hw.perflevel1.physicalcpu: 6
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_SME: 1
hw.optional.arm.FEAT_SME2: 1
"""
INTEL_MAC = """hw.physicalcpu: 6
hw.optional.avx1_0: 1
hw.optional.avx2_0: 1
hw.optional.avx512f: 0
hw.optional.fma: 1
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("text", "fast", "slow", "features"),
    [
        (M1, 4, 4, ["neon", "fp16", "dotprod"]),
        (M4, 4, 6, ["neon", "bf16", "sme", "sme2"]),
        (INTEL_MAC, 6, 0, ["avx", "avx2", "fma"]),
        ("", None, None, None),
    ],
    ids=["M1", "M4", "Intel", "nothing"],
)
def test_macos_names_its_cores_and_features(text: str, fast, slow, features) -> None:
    assert facts.parse_sysctl(text) == (fast, slow, features)


def test_linux_flags_that_matter_are_kept() -> None:
    x86 = "processor\t: 0\nmodel name\t: A\nflags\t\t: fpu avx avx2 sse4_2 avx512_bf16 amx_bf16\n"
    assert facts.parse_cpuinfo(x86) == ["avx", "avx2", "avx512_bf16", "amx_bf16"]
    arm = "processor\t: 0\nFeatures\t: fp asimd evtstrm asimdhp bf16 i8mm\n"
    assert facts.parse_cpuinfo(arm) == ["asimd", "asimdhp", "bf16", "i8mm"]
    assert facts.parse_cpuinfo("processor : 0\n") is None


def test_an_intel_hybrid_counts_cores_and_not_threads(tmp_path: Path) -> None:
    cpus = {
        f"devices/system/cpu/cpu{n}/topology/core_cpus_list": f"{n // 2 * 2}-{n // 2 * 2 + 1}"
        for n in range(4)
    }
    cpus |= {f"devices/system/cpu/cpu{n}/topology/core_cpus_list": str(n) for n in range(4, 8)}
    sysfs = write(
        tmp_path, {"devices/cpu_core/cpus": "0-3", "devices/cpu_atom/cpus": "4-7", **cpus}
    )
    assert facts.linux_core_kinds(sysfs) == (2, 4)


def test_arm_cores_of_less_capacity_are_efficiency_cores(tmp_path: Path) -> None:
    cpus = {f"devices/system/cpu/cpu{n}/cpu_capacity": "1024" if n < 2 else "400" for n in range(6)}
    assert facts.linux_core_kinds(write(tmp_path, cpus)) == (2, 4)


def test_a_plain_processor_has_one_kind_of_core(tmp_path: Path) -> None:
    cpus = {
        f"devices/system/cpu/cpu{n}/topology/core_cpus_list": f"{n % 2},{n % 2 + 2}"
        for n in range(4)
    }
    assert facts.linux_core_kinds(write(tmp_path, cpus)) == (2, 0)
    assert facts.linux_core_kinds(tmp_path / "nothing") == (None, None)


def test_lists_of_cpus() -> None:
    assert facts.parse_cpu_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert facts.parse_cpu_list("") == []


def test_windows_records_give_the_class_of_each_core() -> None:
    def record(kind: int, efficiency: int) -> bytes:
        return struct.pack("<IIBB", kind, 48, 1, efficiency) + bytes(38)

    buffer = record(0, 1) * 4 + record(3, 9) + record(0, 0) * 8
    assert facts.parse_windows_cores(buffer) == [1] * 4 + [0] * 8
    assert facts.core_kinds([1] * 4 + [0] * 8) == (4, 8)
    assert facts.core_kinds([]) == (None, None)
    assert facts.parse_windows_cores(bytes(20)) == []  # a size of 0 must not loop for ever


def test_this_processor_has_cores() -> None:
    found = facts.processor()
    assert found.usable_cores >= 1
    assert found.physical_cores is None or found.physical_cores >= 1


def test_facts_are_there() -> None:
    found = facts.machine_facts()
    assert found["chip"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28

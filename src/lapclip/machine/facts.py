"""Facts about the machine: the system, the processor with its kinds of cores and vector units, and the accelerators, as
the system names them and, where it is installed, NVIDIA's own library does; and how the system is asked: commands and
small files, either of which may be missing or forbidden. No torch.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

SYSFS = Path("/sys")
ENDINGS = (".exe",) if sys.platform == "win32" else ("",)
"""How the file of a program is called, after its name."""

X86_FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
)  # fmt: skip
"""What matters to training among the flags of Linux' /proc/cpuinfo."""
ARM_FLAGS = ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme", "sme2")
APPLE_FEATURES = {
    "hw.optional.AdvSIMD": "neon",
    "hw.optional.neon": "neon",
    "hw.optional.arm.FEAT_FP16": "fp16",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.arm.FEAT_SME2": "sme2",
    "hw.optional.avx1_0": "avx",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.avx512f": "avx512f",
}
"""The names of macOS' sysctl. It does not name AMX, the matrix unit of M1 to M3 that Accelerate uses."""
WINDOWS_FEATURES = {
    19: "neon",
    39: "avx",
    40: "avx2",
    41: "avx512f",
    43: "dotprod",
    46: "sve",
    47: "sve2",
}
"""PF_... numbers of IsProcessorFeaturePresent (winnt.h). Windows does not report bfloat16."""
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.free,driver_version",
    "--format=csv,noheader,nounits",
)
THERMAL = 0x08 | 0x20 | 0x40
"""nvmlClocksThrottleReason: HwSlowdown, SwThermalSlowdown, HwThermalSlowdown (nvml.h)."""


def machine_facts() -> dict[str, Any]:
    """What a run records about the computer it ran on. Nothing here identifies a person."""
    return {
        "chip": _chip(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def logical_cores() -> int:
    """The cores this process may use, as the system counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def source_commit() -> str | None:
    """The commit of lapclip's own source, where it runs from a clone."""
    own = Path(__file__)
    found = output_of("git", "-C", str(own.parent), "rev-parse", "--verify", "--short=12", "HEAD")
    tracked = found and output_of(
        "git", "-C", str(own.parent), "ls-files", "--error-unmatch", own.name
    )
    return found.strip() if found and tracked else None


def _chip() -> str:
    """The processor's name, as the system gives it."""
    try:
        if sys.platform == "linux":
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith(("model name", "Model")):
                    return line.split(":", 1)[1].strip()
        if sys.platform == "darwin":
            if found := output_of("sysctl", "-n", "machdep.cpu.brand_string"):
                return found.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


@dataclass(frozen=True)
class Processor:
    """What the system tells; None is unknown."""

    physical_cores: int | None
    usable_cores: int
    """Logical cores this process may use: fewer in a container or under taskset."""
    performance_cores: int | None
    efficiency_cores: int | None
    features: list[str] | None


def processor() -> Processor:
    """The processor of this machine."""
    physical = psutil.cpu_count(logical=False)
    fast, slow, features = None, None, None
    if sys.platform == "linux":
        fast, slow = linux_core_kinds(SYSFS)
        features = parse_cpuinfo(text_of(Path("/proc/cpuinfo")) or "")
    elif sys.platform == "darwin":
        fast, slow, features = parse_sysctl(output_of("sysctl", "hw") or "")
    elif sys.platform == "win32":
        fast, slow = core_kinds(parse_windows_cores(_windows_cores()))
        features = _windows_features()
    return Processor(physical, logical_cores(), fast, slow, features)


def parse_cpuinfo(text: str) -> list[str] | None:
    """The vector features among the flags of /proc/cpuinfo; None where it lists none."""
    for line in text.splitlines():
        name, colon, flags = line.partition(":")
        if colon and name.strip() in ("flags", "Features"):
            there = set(flags.split())
            return [flag for flag in (*X86_FLAGS, *ARM_FLAGS) if flag in there]
    return None


def parse_sysctl(text: str) -> tuple[int | None, int | None, list[str] | None]:
    """Performance cores, efficiency cores and features from the output of macOS' `sysctl hw`."""
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    if not values:
        return None, None, None
    features = dict.fromkeys(
        feature for name, feature in APPLE_FEATURES.items() if values.get(name, "").strip() == "1"
    )
    levels = [values.get(f"hw.perflevel{level}.physicalcpu", "").strip() for level in range(2)]
    fast, slow = (int(level) if level.isdigit() else None for level in levels)
    if fast is None:  # Intel Macs have one kind and no levels
        whole = values.get("hw.physicalcpu", "").strip()
        return (
            (int(whole) if whole.isdigit() else None),
            (0 if whole.isdigit() else None),
            list(features),
        )
    return fast, slow or 0, list(features)


def linux_core_kinds(sysfs: Path) -> tuple[int | None, int | None]:
    """Performance and efficiency cores: Intel's hybrid chips list them, ARM's state each core's capacity."""
    fast, slow = (text_of(sysfs / "devices" / kind / "cpus") for kind in ("cpu_core", "cpu_atom"))
    if fast and slow:
        return tuple(_distinct_cores(sysfs, parse_cpu_list(cpus)) for cpus in (fast, slow))  # pyright: ignore
    folders = sorted((sysfs / "devices/system/cpu").glob("cpu[0-9]*"))
    cores: dict[str, int] = {}  # hyperthreads of one core share their list of siblings
    for folder in folders:
        siblings = text_of(folder / "topology/core_cpus_list") or text_of(
            folder / "topology/thread_siblings_list"
        )
        cores[siblings or folder.name] = number_in(folder / "cpu_capacity") or 0
    return core_kinds(cores.values())


def core_kinds(strength: Iterable[int]) -> tuple[int | None, int | None]:
    """Performance and efficiency cores, from a strength for each core: the strongest are the performance cores."""
    strengths = list(strength)
    if not strengths:
        return None, None
    fast = sum(each == max(strengths) for each in strengths)
    return fast, len(strengths) - fast


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` as numbers."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _distinct_cores(sysfs: Path, cpus: list[int]) -> int:
    folders = (sysfs / "devices/system/cpu" / f"cpu{cpu}" / "topology" for cpu in cpus)
    return len({text_of(folder / "core_cpus_list") or folder.parent.name for folder in folders})


def parse_windows_cores(buffer: bytes) -> list[int]:
    """The efficiency class of each core from GetLogicalProcessorInformationEx; higher is faster.

    Records of a kind, their size, flags and the class: DWORD, DWORD, BYTE, BYTE (winnt.h).
    """
    classes, at = [], 0
    while at + 10 <= len(buffer):
        kind, size = (int.from_bytes(buffer[at + i : at + i + 4], "little") for i in (0, 4))
        if size < 10:
            break
        if kind == 0:  # RelationProcessorCore
            classes.append(buffer[at + 9])
        at += size
    return classes


def _windows_cores() -> bytes:
    try:
        ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx  # pyright: ignore[reportAttributeAccessIssue]
        size = ctypes.c_ulong(0)
        ask(0, None, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        return buffer.raw if ask(0, buffer, ctypes.byref(size)) else b""
    except (AttributeError, OSError):
        return b""


def _windows_features() -> list[str] | None:
    try:
        present = ctypes.windll.kernel32.IsProcessorFeaturePresent  # pyright: ignore[reportAttributeAccessIssue]
        return [feature for number, feature in WINDOWS_FEATURES.items() if present(number)]
    except (AttributeError, OSError):
        return None


def accelerators() -> list[dict[str, Any]]:
    """The accelerators that the system shows, named as torch names their kind."""
    if sys.platform == "darwin":
        return parse_system_profiler(
            output_of("system_profiler", "-json", "SPDisplaysDataType", seconds=15) or ""
        )
    driver = nvidia_driver()
    found = [
        accelerator(
            "cuda", gpu.name or "NVIDIA GPU", *gpu.memory, driver=driver, shares_memory=False
        )
        for gpu in nvidia_gpus()
    ]
    return found or parse_nvidia_smi(output_of(*NVIDIA_SMI, seconds=15) or "")


def accelerator(
    kind: str,
    name: str,
    memory_bytes: int | None = None,
    free_bytes: int | None = None,
    *,
    driver: str | None = None,
    shares_memory: bool | None = None,
) -> dict[str, Any]:
    """One accelerator, as `lapclip machine --json` lists it; None is unknown."""
    return {
        "kind": kind,
        "name": name,
        "memory_bytes": memory_bytes,
        "free_bytes": free_bytes,
        "shares_memory": shares_memory,
        "driver": driver,
    }


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """The rows of nvidia-smi: name, MiB in all, MiB free, driver. What a card does not know it writes in brackets."""
    rows = (row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4)
    return [
        accelerator(
            "cuda", name, _mebibytes(total), _mebibytes(free), driver=driver, shares_memory=False
        )
        for name, total, free, driver in rows
    ]


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.strip().isdigit() else None


def parse_system_profiler(text: str) -> list[dict[str, Any]]:
    """The GPUs that macOS lists. Those in Apple's chips use the machine's own memory; the driver is the system's."""
    try:
        listed = json.loads(text)["SPDisplaysDataType"]
    except (ValueError, KeyError, TypeError):
        return []
    found = []
    for card in listed:
        name = card.get("sppci_model") or card.get("_name") or "GPU"
        if cores := card.get("sppci_cores"):
            name = f"{name}, {cores} GPU cores"
        metal = card.get("spdisplays_mtlgpufamilysupport") or card.get("spdisplays_metal") or ""
        driver = metal.removeprefix("spdisplays_").replace("metal", "Metal ").strip() or None
        apple = "apple" in (card.get("spdisplays_vendor") or name).lower()
        found.append(accelerator("mps", name, driver=driver, shares_memory=True if apple else None))
    return found


@cache
def nvml_library() -> tuple[Any, str]:
    """The library, ready to be asked, or None and the reason."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports] (optional)
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver answers ({error})"
    return pynvml, ""


class NvidiaGpu:
    """One NVIDIA GPU; every answer may be None."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self.index = nvml, index
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):  # not known to this card, driver or release
            return None

    @property
    def name(self) -> str | None:
        return _text(self._ask("nvmlDeviceGetName"))

    @property
    def memory(self) -> tuple[int | None, int | None]:
        """Bytes in all and free."""
        answer = self._ask("nvmlDeviceGetMemoryInfo")
        return (None, None) if answer is None else (int(answer.total), int(answer.free))

    @property
    def celsius(self) -> float | None:
        answer = self._ask("nvmlDeviceGetTemperature", 0)  # NVML_TEMPERATURE_GPU
        return None if answer is None else float(answer)

    @property
    def joules(self) -> float | None:
        """Energy since the driver was loaded; from Volta on."""
        answer = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if answer is None else answer / 1000

    @property
    def throttled(self) -> bool | None:
        answer = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if answer is None else bool(answer & THERMAL)


def nvidia_gpus() -> list[NvidiaGpu]:
    """Every NVIDIA GPU that the driver shows."""
    nvml, _ = nvml_library()
    if nvml is None:
        return []
    try:
        return [NvidiaGpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def nvidia_driver() -> str | None:
    """The driver's version."""
    nvml, _ = nvml_library()
    if nvml is None:
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


def _text(answer: Any) -> str | None:
    """Older releases of the package give bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer


def python(*arguments: str) -> list[str]:
    """The command line of a Python process. Without `-P` it would look for modules in the current folder first, and
    a file there that is called like one of them would run."""
    return [sys.executable, "-P", *arguments]


def program(name: str) -> str | None:
    """The whole path of a program, from the folders that PATH names in full; None where there is none. A bare name
    would be looked for in the current folder too: on Windows always, elsewhere where PATH has a dot."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for ending in ENDINGS:
            path = os.path.join(folder, name + ending)
            if os.path.isabs(folder) and os.path.isfile(path) and os.access(path, os.X_OK):
                return path
    return None


def output_of(name: str, *arguments: str, seconds: float = 5.0) -> str | None:
    """What a program prints, or None where it is missing, fails without output or takes too long.

    A program that prints and then fails still counts: macOS' sysctl does so when one of several names is unknown.
    """
    found = program(name)
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *arguments], capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace") or None


def text_of(path: Path) -> str | None:
    """A small file's text without its last line break, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number_in(path: Path) -> int | None:
    """The whole number a small file holds, or None."""
    try:
        return int(text_of(path) or "")
    except ValueError:
        return None

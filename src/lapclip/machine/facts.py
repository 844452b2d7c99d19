"""Facts about the machine: the system, the processor, the accelerators, and how the system is asked.

Commands and small files are read, either of which may be missing or forbidden. No torch.
"""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ENDINGS = (".exe",) if sys.platform == "win32" else ("",)
"""How the file of a program is called, after its name."""

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


def accelerators() -> list[dict[str, Any]]:
    """Return the accelerators that the system shows, each kind named as torch names it."""
    if sys.platform == "darwin":
        if platform.machine() != "arm64":
            return []
        return [accelerator("mps", f"GPU of {_chip()}", shares_memory=True)]
    return parse_nvidia_smi(output_of(*NVIDIA_SMI, seconds=15) or "")


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

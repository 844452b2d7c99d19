"""The accelerators of this machine, as the system names them and, where it is installed, NVIDIA's own library does.

No torch.
"""

from __future__ import annotations

import csv
import json
import sys
from functools import cache
from typing import Any

from lapclip.machine.facts import output_of

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits")


def accelerators() -> list[dict[str, Any]]:
    """The accelerators that the system shows, named as torch names their kind."""
    if sys.platform == "darwin":
        return parse_system_profiler(output_of("system_profiler", "-json", "SPDisplaysDataType", seconds=15) or "")
    driver = nvidia_driver()
    found = [
        accelerator("cuda", gpu.name or "NVIDIA GPU", *gpu.memory, driver=driver, shares_memory=False)
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
        accelerator("cuda", name, _mebibytes(total), _mebibytes(free), driver=driver, shares_memory=False)
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


THERMAL = 0x08 | 0x20 | 0x40
"""nvmlClocksThrottleReason: HwSlowdown, SwThermalSlowdown, HwThermalSlowdown (nvml.h)."""


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

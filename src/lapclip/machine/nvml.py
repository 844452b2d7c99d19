"""NVIDIA's own library of facts and counters, where the package nvidia-ml-py is installed. No torch."""

from __future__ import annotations

from functools import cache
from typing import Any

THERMAL = 0x08 | 0x20 | 0x40
"""nvmlClocksThrottleReason: HwSlowdown, SwThermalSlowdown, HwThermalSlowdown (nvml.h)."""


@cache
def library() -> tuple[Any, str]:
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


class Gpu:
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


def gpus() -> list[Gpu]:
    """Every NVIDIA GPU that the driver shows."""
    nvml, _ = library()
    if nvml is None:
        return []
    try:
        return [Gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def driver() -> str | None:
    """The driver's version."""
    nvml, _ = library()
    if nvml is None:
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


def _text(answer: Any) -> str | None:
    """Older releases of the package give bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer

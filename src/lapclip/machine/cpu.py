"""The processor itself. It computes while it is called, in the process's own memory; its results are the reference."""

from __future__ import annotations

import ctypes
import sys
import threading

from lapclip.machine import canary, system_memory
from lapclip.machine.device import Device, PeakMemory, register

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@register
class Cpu(Device):
    """The processor of this machine."""

    kind = "cpu"
    is_cpu = True
    shares_memory = True
    is_deterministic = True
    norms_mixed_dtypes = True
    runs_onednn = True
    recomputes_gelu = True  # cores that share a memory wait for it

    def examine(self, *precisions: str) -> list[canary.Result]:
        """Nothing: the CPU is trusted, and the canary compares with it."""
        return []

    def synchronise(self) -> None:
        """Everything asked for has been computed already; torch.accelerator raises in builds without accelerators."""

    def free_bytes(self) -> int:
        return system_memory.available_bytes()

    def peak_memory_bytes(self) -> int:
        return system_memory.peak_memory_bytes()

    def forget_peak(self) -> None:
        system_memory.forget_peak()

    def release_memory(self) -> None:
        """What is free between two blocks of the C library goes back to the system too."""
        if sys.platform == "linux":
            try:
                ctypes.CDLL(None).malloc_trim(0)  # glibc's
            except (OSError, AttributeError):
                pass

    def watch_peak(self) -> PeakMemory:
        return SampledPeak(self)


class SampledPeak(PeakMemory):
    """The process's memory, read again and again: its own peak cannot be reset on every system."""

    EVERY = 0.005
    """Seconds between two readings. What lives shorter than that is missed."""

    def __enter__(self) -> PeakMemory:
        super().__enter__()
        self.before, self._over = system_memory.memory_bytes(), threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="lapclip-peak", daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._sampler.join()
        self.bytes = max(
            self.bytes, system_memory.memory_bytes()
        )  # what came after the last reading

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, system_memory.memory_bytes())
            if self._over.wait(self.EVERY):
                return


def keep_freed_memory() -> None:
    """Have the C library reuse large blocks instead of giving them back to the system after each operation.

    Each block taken anew is filled with zeros by the system, a page at a time.
    """
    if sys.platform != "linux":
        return
    try:
        adjust = ctypes.CDLL(None).mallopt  # glibc's; other C libraries have none
        # Older releases take 32 MiB at most; where that is refused too, the defaults are better left alone.
        if adjust(_M_MMAP_THRESHOLD, 1 << 30) or adjust(_M_MMAP_THRESHOLD, 1 << 25):
            adjust(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass

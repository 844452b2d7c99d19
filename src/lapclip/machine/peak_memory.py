"""The most memory held while something runs: the process's on the CPU, the allocator's on an accelerator."""

from __future__ import annotations

import gc
import threading

from lapclip.machine import facts
from lapclip.machine.devices import Device

EVERY = 0.005
"""Seconds between looks at the process. What lives shorter than that is missed."""


class PeakMemory:
    """Watches from the beginning of a `with` to its end; `bytes` is the most that was seen, `before` what there was."""

    def __init__(self, device: Device) -> None:
        self._device, self.bytes, self.before = device, 0, 0
        self._over = threading.Event()

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._device.release_memory()  # otherwise what an earlier computation freed would be counted too
        self._device.forget_peak()
        self.before = facts.memory_bytes() if self._device.is_cpu else self._device.peak_memory_bytes()
        if self._device.is_cpu:
            self._watcher = threading.Thread(target=self._watch, name="lapclip-peak", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.is_cpu:
            self._over.set()
            self._watcher.join()
        else:
            self.bytes = self._device.peak_memory_bytes()

    @property
    def added(self) -> int:
        """The most that was held beside what there was."""
        return max(0, self.bytes - self.before)

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, facts.memory_bytes())
            if self._over.wait(EVERY):
                return

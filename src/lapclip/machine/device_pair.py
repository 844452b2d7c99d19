"""Two devices that one model is trained on at once, a tower on each.

Asked as one device it answers for both. The loss is computed on one of the two: on the accelerator, unless told
otherwise. Embeddings of one side have to cross over wherever it is, and the square of all pairs grows with the batch,
which is what an accelerator is faster at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapclip.machine import canary
from lapclip.machine.device import Device, PeakMemory

PLUS = "+"
"""Between the two names of a pair, the image tower's first."""


@dataclass(frozen=True)
class DevicePair(Device):
    """A device for each tower. Both may be the CPU, which then has a share of its threads for each."""

    image: Device
    text: Device
    loss: Device
    """One of the two."""

    def __post_init__(self) -> None:
        both = (self.image, self.text)
        together = {
            "kind": PLUS.join(device.kind for device in both),
            "is_cpu": all(device.is_cpu for device in both),
            "records_graphs": any(device.records_graphs for device in both),
            "pins_memory": any(device.pins_memory for device in both),
            "shares_memory": any(device.shares_memory for device in both),
            "is_deterministic": all(device.is_deterministic for device in both),
        }
        for (
            name,
            value,
        ) in together.items():  # of a kind these are facts of its class, here they follow from two
            object.__setattr__(self, name, value)

    def of(self, part: str) -> Device:
        return {"image": self.image, "text": self.text}.get(part, self.loss)

    @property
    def each(self) -> tuple[Device, ...]:
        """Both, or the one that they are."""
        return (self.image,) if self.image == self.text else (self.image, self.text)

    @property
    def accelerator(self) -> Device:
        """The one that is not the CPU, where there is one."""
        return next((device for device in self.each if not device.is_cpu), self.loss)

    @property
    def torch(self) -> torch.device:
        """Where the loss is computed."""
        return self.loss.torch

    @property
    def label(self) -> str:
        return " and ".join(device.label for device in self.each)

    @property
    def key(self) -> str:
        return " and ".join(device.key for device in (self.image, self.text))

    def examine(self, *precisions: str) -> list[canary.Result]:
        return [result for device in self.each for result in device.examine(*precisions)]

    def failures(self, *precisions: str) -> list[canary.Result]:
        return [result for device in self.each for result in device.failures(*precisions)]

    def trusted(self, operation: str) -> bool:
        return all(device.trusted(operation) for device in self.each)

    def unfit(self, dtype: str = "float32") -> str | None:
        return next((fault for device in self.each if (fault := device.unfit(dtype))), None)

    def warnings(self) -> list[str]:
        return [text for device in self.each for text in device.warnings()]

    def warm_up(self) -> None:
        for device in self.each:
            device.warm_up()

    def synchronise(self) -> None:
        for device in self.each:
            device.synchronise()

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        return self.loss.read_later(values)

    def free_bytes(self) -> int:
        """What is free on the one that has less: whatever fits there as a whole fits, however it is divided."""
        return min(device.free_bytes() for device in self.each)

    def peak_memory_bytes(self) -> int:
        return sum(device.peak_memory_bytes() for device in self.each)

    def forget_peak(self) -> None:
        for device in self.each:
            device.forget_peak()

    def release_memory(self) -> None:
        for device in self.each:
            device.release_memory()

    def limit_memory(self) -> None:
        for device in self.each:
            device.limit_memory()

    def watch_peak(self) -> PeakMemory:
        return _PeaksOfBoth(self)

    def abandon(self, *holding: object) -> None:
        self.accelerator.abandon(*holding)


class _PeaksOfBoth(PeakMemory):
    """The peaks of two devices, each measured as that device does, added up: they need not be at the same moment."""

    def __init__(self, pair: DevicePair) -> None:
        super().__init__(pair)
        self._peaks = [device.watch_peak() for device in pair.each]

    def __enter__(self) -> PeakMemory:
        for peak in self._peaks:
            peak.__enter__()
        self.before = sum(peak.before for peak in self._peaks)
        return self

    def __exit__(self, *_: object) -> None:
        for peak in self._peaks:
            peak.__exit__()
        self.bytes = sum(peak.bytes for peak in self._peaks)

"""What every kind of device can be asked, and the table of the kinds there are.

A kind is one class: the CPU's is in `cpu.py`, those of GPUs are in `gpus.py`. Code outside this folder asks the device
and never compares kinds, so that a new kind is one more class. Run on CPU and CUDA; the classes for MPS and XPU are
written from documentation and have not been run on such hardware.
"""

from __future__ import annotations

import ctypes
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from lapclip.machine import canary, facts
from lapclip.machine.transfer import PinnedTransfer, Transfer

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What activations are in, by the precision of a run, the plainest first."""

ESSENTIAL = (
    "attention",
    "masked attention",
    "attention of one query",
    "layer norm",
    "gelu",
    "embedding",
    "adamw",
)
"""Operations of the canary that training cannot do without. The others have a slower form to fall back on."""

KINDS: dict[str, type[Device]] = {}
"""The class of each kind of device, by torch's name for it."""
UNTRUSTED: set[tuple[str, str]] = set()
"""Kinds of device with operations to avoid there: those known to have been wrong, and those that fail the canary."""
EXAMINED: dict[str, dict[str, list[canary.Result]]] = {}
"""The results of the canary in this process, by kind of device and precision."""

Result = TypeVar("Result")
Compute = Callable[[], torch.Tensor]


class GraphRecorder(Protocol):
    """Records what is sent to a device, so that it can be sent again at once."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """Run something that is to be recorded later, so that libraries have set themselves up."""
        ...

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """What replays the work of `run`, and its result. Recording computes nothing."""
        ...


@dataclass(frozen=True)
class Device(ABC):
    """A device to compute on. Two objects of the same kind are equal."""

    kind: ClassVar[str]
    """torch's name for it."""
    is_cpu: ClassVar[bool] = False
    collectives: ClassVar[str] = "gloo"
    """What carries tensors from one rank to another; gloo takes those of the CPU."""
    half: ClassVar[str] = "bfloat16"
    """The half precision to try first: bfloat16 needs no loss scale."""
    records_graphs: ClassVar[bool] = False
    """Whether a whole update can be recorded and replayed."""
    pins_memory: ClassVar[bool] = False
    """Whether copies from memory that the system may not move can be had; where memory is shared, none are made."""
    shares_memory: ClassVar[bool] = False
    """Whether the device works in the machine's own memory, which the system swaps sooner than it refuses more."""
    is_deterministic: ClassVar[bool] = False
    """Whether torch's deterministic algorithms are asked for.

    On accelerators they would forbid fast kernels, and results there differ between machines anyway.
    """
    norms_mixed_dtypes: ClassVar[bool] = False
    """Whether layer norm takes half-precision inputs with float32 weights, and sums in float32 itself."""
    runs_onednn: ClassVar[bool] = False
    """Whether oneDNN's kernels compute there, in builds of torch that carry the library."""
    recomputes_gelu: ClassVar[bool] = False
    """Whether the backward pass computes GELU again sooner than it reads what the forward pass would have to keep."""
    runs_triton: ClassVar[bool] = False
    """Whether kernels written in Triton can be compiled for it here."""
    untrusted: ClassVar[frozenset[str]] = frozenset()
    """Operations of the canary known to have been silently wrong there. The canary checks few shapes, so passing it
    does not lift these."""
    trusted_once_seen: ClassVar[frozenset[str]] = frozenset()
    """Operations that are used only where the canary has seen them work."""

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def label(self) -> str:
        """The name of the hardware, for people."""
        return facts.machine_facts()["chip"]

    @property
    def key(self) -> str:
        """What a measurement on this device depends on beside its own sizes."""
        return f"{facts.machine_facts()['chip']} {self.kind} {self.label} torch {torch.__version__}"

    # Which operations can be trusted

    def examine(self, *precisions: str) -> list[canary.Result]:
        """The results of the canary here, in some precisions or in all: from memory, or by a few seconds of checks."""
        known = EXAMINED.setdefault(self.kind, {})
        known |= self._consult(
            [precision for precision in precisions or canary.PRECISIONS if precision not in known]
        )
        UNTRUSTED.update((self.kind, result.operation) for result in self.failures())
        return [result for results in known.values() for result in results]

    def _consult(self, precisions: list[str]) -> dict[str, list[canary.Result]]:
        return {
            precision: canary.consult(self.torch, self.label, precision) for precision in precisions
        }

    def warm_up(self) -> None:  # noqa: B027 (the CPU has nothing to do)
        """Have libraries set themselves up there, which takes seconds and can be done beside other work."""

    def failures(self, *precisions: str) -> list[canary.Result]:
        """The checks that failed here, in some precisions or in all."""
        known = EXAMINED.get(self.kind, {})
        return [
            r
            for name, found in known.items()
            for r in found
            if not r.ok and name in (precisions or known)
        ]

    def trusted(self, operation: str) -> bool:
        """Whether an operation of the canary is to be used here."""
        seen = {
            result.operation for found in EXAMINED.get(self.kind, {}).values() for result in found
        }
        return (
            self.kind,
            operation,
        ) not in UNTRUSTED and operation not in self.trusted_once_seen - seen

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW's fused form is right here."""
        return self.trusted("fused adamw") and self.trusted("fused adamw with an overflow")

    def unfit(self, dtype: str = "float32") -> str | None:
        """Why this device must not be chosen to train in a precision, if so."""
        self.examine(dtype)
        wrong = [result for result in self.failures(dtype) if result.operation in ESSENTIAL]
        return f"{self.kind} computes wrongly here: {wrong[0].sentence()}" if wrong else None

    def warnings(self) -> list[str]:
        """What the user should know of the checks that failed."""
        return [
            f"{self.kind} fails a check, so this is avoided where it can be: {r.sentence()}"
            for r in self.failures()
        ]

    # Sending batches and waiting for results

    def transfer(self) -> Transfer:
        """What brings batches here."""
        return Transfer(self.torch)

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until everything asked for has been computed."""

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to bring values to the CPU; the function returned waits for them, and for nothing computed since."""
        return values.tolist

    def side_by_side(
        self, *, at_once: bool
    ) -> Callable[[Compute, Compute], tuple[torch.Tensor, torch.Tensor]]:
        """A function that runs two computations: at once where that can be had and is asked for, else in turn."""
        return lambda first, second: (first(), second())

    def graph_recorder(self) -> GraphRecorder:
        """What records and replays work; only where `records_graphs`."""
        raise NotImplementedError(f"nothing can be recorded on {self.kind}")

    # Memory

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that training could have now, besides what it has."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """The most memory training has held: the process's on the CPU, the allocator's on an accelerator."""

    @abstractmethod
    def forget_peak(self) -> None:
        """Count the peak from here, where that can be had."""

    @abstractmethod
    def release_memory(self) -> None:
        """Give back what torch holds for later. A device that has failed does not mind not being asked."""

    def limit_memory(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Have the allocator refuse what the system would have to swap for, where it does not do so by itself."""

    def watch_peak(self) -> PeakMemory:
        """A context that measures the most memory held inside it."""
        return PeakMemory(self)

    # Failing, and being listed

    def abandon(self, *holding: object) -> None:
        """Have torch forget a device that has failed, for as long as this process lives.

        Freeing pinned memory asks the device, and an error there ends the process; so what holds its memory is never
        freed.
        """
        for held in holding:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def listed(self) -> list[dict[str, Any]]:
        """The accelerators of this kind that torch can use, as `lapclip machine --json` lists them."""
        return []


class Accelerator(Device):
    """A device with memory of its own that torch reaches by `torch.accelerator` and by a module of its own."""

    @property
    def _module(self) -> Any:
        """`torch.cuda`, `torch.xpu`, ..."""
        return torch.get_device_module(self.kind)

    @property
    def label(self) -> str:
        return self._module.get_device_name()

    def warm_up(self) -> None:
        for dtype in (torch.float32, DTYPES[self.half]):
            ones = torch.ones(64, 64, device=self.torch, dtype=dtype)
            torch.mm(ones, ones)
        self.synchronise()

    def transfer(self) -> Transfer:
        return PinnedTransfer(self.torch, self._module) if self.pins_memory else super().transfer()

    def synchronise(self) -> None:
        torch.accelerator.synchronize()

    def free_bytes(self) -> int:
        # What torch has taken from the driver and does not use is free too.
        module = self._module
        return module.mem_get_info()[0] + module.memory_reserved() - module.memory_allocated()

    def peak_memory_bytes(self) -> int:
        return self._module.max_memory_allocated()

    def forget_peak(self) -> None:
        with suppress(RuntimeError):  # a device that is not there has no peak
            torch.accelerator.reset_peak_memory_stats()

    def release_memory(self) -> None:
        with suppress(RuntimeError):
            torch.accelerator.empty_cache()

    def abandon(self, *holding: object) -> None:
        super().abandon(*holding)
        torch.accelerator.current_accelerator = lambda check_available=False: None

    def listed(self) -> list[dict[str, Any]]:
        found = []
        for index in range(torch.accelerator.device_count()):
            properties = self._module.get_device_properties(index)
            driver = torch.version.hip or getattr(properties, "driver_version", None)
            memory = getattr(properties, "total_memory", None)
            found.append(facts.accelerator(self.kind, properties.name, memory, driver=driver))
        return found


class PeakMemory:
    """Measures within a `with`: `bytes` is the most that was held, `before` what there was at its beginning."""

    def __init__(self, device: Device) -> None:
        self._device, self.bytes, self.before = device, 0, 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._device.release_memory()  # otherwise what an earlier computation freed would be counted too
        self._device.forget_peak()
        self.before = self._device.peak_memory_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._device.peak_memory_bytes()

    @property
    def added(self) -> int:
        """The most that was held beside what there was."""
        return max(0, self.bytes - self.before)


Kind = TypeVar("Kind", bound=type[Device])


def register(kind: Kind) -> Kind:
    """Make a class known as a kind of device, with the operations that are not to be trusted there."""
    KINDS[kind.kind] = kind
    UNTRUSTED.update((kind.kind, operation) for operation in kind.untrusted)
    return kind

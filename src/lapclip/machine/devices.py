"""What torch can compute on here. The only file that knows how CPU, CUDA, MPS and XPU differ.

Run on CPU and CUDA; the MPS and XPU paths are written from documentation and have not been run on such hardware.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from lapclip.config import AUTO
from lapclip.errors import ConfigError, first_line
from lapclip.machine import canary, facts

_OWN_THREADS = torch.get_num_threads()  # before anything changes it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ESSENTIAL = ("attention", "masked attention", "attention of one query", "layer norm", "gelu", "embedding", "adamw")
"""Operations of the canary that training cannot do without. The others have a slower form to fall back on."""

_distrusted: set[tuple[str, str]] = {("mps", "permuted attention"), ("mps", "causal attention")}
"""Kinds of device with operations to avoid there: those known to have been wrong, and those the canary finds.

On MPS attention has been silently wrong for permuted inputs (pytorch issues 163597, 181133), and `is_causal` has let
half-precision queries see later keys (195910). The canary looks at few shapes, so passing it does not lift these.
"""
_examined: dict[str, list[canary.Result]] = {}
"""What the canary found in this process, by kind of device."""


@dataclass(frozen=True)
class Device:
    """A place to compute: `cpu`, `cuda`, `mps` or `xpu`."""

    kind: str

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def label(self) -> str:
        """The name of the hardware, for people."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name()
        if self.kind == "xpu":
            return torch.xpu.get_device_name()
        return facts.machine_facts()["chip"]

    @property
    def key(self) -> str:
        """What a measurement on this device depends on beside its own sizes."""
        return f"{facts.machine_facts()['chip']} {self.kind} {self.label} torch {torch.__version__}"

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW's fused form is right here.

        On MPS it ignored found_inf (pytorch issue 186360), so there only where the canary has seen it work.
        """
        seen = {result.operation for result in _examined.get(self.kind, ())}
        if self.kind == "mps" and "fused adamw with an overflow" not in seen:
            return False
        return self.trusted("fused adamw") and self.trusted("fused adamw with an overflow")

    @property
    def half(self) -> str:
        """The half precision to try first: bfloat16 needs no loss scale, but M1 and M2 emulate it."""
        return "float16" if self.kind == "mps" else "bfloat16"

    @property
    def records_graphs(self) -> bool:
        """Whether a whole update can be recorded and replayed."""
        return self.kind == "cuda"

    def examine(self) -> list[canary.Result]:
        """What the canary says of this device: from memory, or by a few seconds of checks. The CPU is trusted."""
        if self.is_cpu:
            return []
        if self.kind not in _examined:
            _examined[self.kind] = canary.consult(self.torch, self.label)
            _distrusted.update((self.kind, result.operation) for result in self.failures())
        return _examined[self.kind]

    def failures(self, *precisions: str) -> list[canary.Result]:
        """The checks that failed here, in some precisions or in all."""
        found = [result for result in _examined.get(self.kind, []) if not result.ok]
        return [result for result in found if not precisions or result.precision in precisions]

    def trusted(self, operation: str) -> bool:
        """Whether an operation of the canary is to be used here."""
        return (self.kind, operation) not in _distrusted

    def unfit(self, dtype: str = "float32") -> str | None:
        """Why this device must not be chosen to train in a precision, if so."""
        wrong = [result for result in self.failures(dtype) if result.operation in ESSENTIAL]
        return f"{self.kind} computes wrongly here: {wrong[0].sentence()}" if wrong else None

    def warnings(self) -> list[str]:
        """What the user should know of the canary's findings."""
        return [
            f"{self.kind} fails a check, so this is avoided where it can be: {r.sentence()}" for r in self.failures()
        ]

    @property
    def pins_memory(self) -> bool:
        """Whether copies from memory that the system may not move can be had; where memory is shared, none are made."""
        return self.kind in ("cuda", "xpu")

    @property
    def shares_memory(self) -> bool:
        """Whether the device works in the machine's own memory."""
        return self.kind in ("cpu", "mps")

    def forget_peak(self) -> None:
        """Count the peak from here, where that can be had."""
        if self.is_cpu:
            facts.forget_peak()
        if self.kind in ("cuda", "xpu"):
            with suppress(RuntimeError):  # a device that is not there has no peak
                torch.accelerator.reset_peak_memory_stats()

    def synchronise(self) -> None:
        """Wait until everything asked for has been computed."""
        if not self.is_cpu:  # torch.accelerator raises on a build without accelerators
            torch.accelerator.synchronize()

    def read_later(self, figures: torch.Tensor) -> Callable[[], list[float]]:
        """Start to bring figures to the CPU; the function returned waits for them, and for nothing computed since."""
        if self.kind != "cuda":
            return figures.tolist
        arrived = torch.empty_like(figures, device="cpu", pin_memory=True)
        arrived.copy_(figures, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[float]:
            copied.synchronize()
            return arrived.tolist()

        return read

    @property
    def swaps(self) -> bool:
        """Whether its memory is the system's, which swaps sooner than it refuses."""
        return self.kind in ("cpu", "mps")

    def free_bytes(self) -> int:
        """Memory that training could have now, besides what it has."""
        if self.kind == "cuda":
            # What torch has taken from the driver and does not use is free too.
            return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if self.kind == "xpu":
            return torch.xpu.mem_get_info()[0] + torch.xpu.memory_reserved() - torch.xpu.memory_allocated()
        if self.kind == "mps":
            # Memory is shared with the rest of the system; beyond the recommended size it would swap.
            unused = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
            return max(0, min(unused, facts.available_bytes()))
        return facts.available_bytes()

    def release_memory(self) -> None:
        """Give back what torch keeps for later. A device that has failed does not mind not being asked."""
        try:
            if self.is_cpu:
                _give_back_freed_memory()
            elif self.kind == "mps":
                torch.mps.empty_cache()
            else:
                torch.accelerator.empty_cache()
        except RuntimeError:
            pass

    def abandon(self, *holding: object) -> None:
        """Have torch forget a device that has failed, for as long as this process lives.

        A failed CUDA context answers every question with its error and cannot be reset (pytorch issue 2300), and torch
        does ask, even for tensors on the CPU: each optimiser step asks whether a recording is under way. Freeing pinned
        memory asks too, and an error there ends the process; so what holds the device's memory is never freed.
        """
        for held in holding:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        if not self.is_cpu:
            torch.accelerator.current_accelerator = lambda check_available=False: None
            torch.cuda.is_available = lambda: False  # what releases before torch 2.13 ask

    def peak_memory_bytes(self) -> int:
        """The most memory training has held: the process's on the CPU, the allocator's on an accelerator."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated()
        if self.kind == "xpu":
            return torch.xpu.max_memory_allocated()
        if self.kind == "mps":
            return torch.mps.driver_allocated_memory()  # MPS keeps no peak; the driver rarely gives memory back
        return facts.peak_memory_bytes()


_streams: dict[str, torch.cuda.Stream] = {}


def own_stream(name: str) -> torch.cuda.Stream:
    """A queue of work beside the usual one, the same for everyone who asks by this name.

    One is enough: cuBLAS keeps tens of megabytes for each stream it has ever seen.
    """
    if name not in _streams:
        _streams[name] = torch.cuda.Stream()
    return _streams[name]


class SideBySide:
    """Two computations at once on CUDA, where small ones leave most of the chip idle; elsewhere one after the other.

    Their backward passes run at once too: torch sends each to where its forward pass ran.
    """

    def __init__(self, device: Device, *, at_once: bool) -> None:
        self._stream = own_stream("beside") if at_once and device.kind == "cuda" else None

    def __call__(
        self, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stream is None:
            return first(), second()
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            aside = second()
        result = first()
        here.wait_stream(self._stream)
        aside.record_stream(here)  # its memory may not be given to others while it is read here
        return result, aside


def ready_for_attention(tensor: torch.Tensor) -> torch.Tensor:
    """Laid out anew where permuted inputs give wrong results."""
    return tensor.contiguous() if (tensor.device.type, "permuted attention") in _distrusted else tensor


def trusts_is_causal(device: torch.device) -> bool:
    """Whether `is_causal` may be used there; a mask says the same."""
    return (device.type, "causal attention") not in _distrusted


def norms_mixed_dtypes(device: torch.device) -> bool:
    """Whether layer norm takes half-precision inputs with float32 weights, and sums in float32 itself."""
    return device.type == "cpu"


def accelerator_here() -> torch.device | None:
    """What torch can use beside the CPU."""
    # Without the check a CUDA build on a machine without a GPU names cuda.
    return torch.accelerator.current_accelerator(check_available=True)


def choose_device(wanted: str) -> tuple[Device, str]:
    """The device to train on, and why."""
    if wanted == "cpu":
        return Device("cpu"), "asked for"
    found = accelerator_here()
    if wanted == AUTO:
        if found is None:
            return Device("cpu"), "torch finds no accelerator here"
        device = Device(found.type)
        device.examine()
        if unfit := device.unfit():
            return Device("cpu"), unfit
        return device, "torch finds this accelerator; the run is too short to time others, lapclip tune does"
    if found is None or wanted not in ("accelerator", found.type):
        here = found.type if found else "none"
        raise ConfigError(
            f"train.device {wanted} is not here (accelerator found: {here}).", hint="--set train.device=auto"
        )
    device = Device(found.type)
    device.examine()
    unfit = device.unfit()
    return device, f"asked for, although {unfit}" if unfit else "asked for"


def available(wanted: str = AUTO) -> list[Device]:
    """The devices that a setting of train.device allows here, the accelerator first."""
    if wanted != AUTO:
        return [choose_device(wanted)[0]]
    found, _ = choose_device(AUTO)
    return [Device("cpu")] if found.is_cpu else [found, Device("cpu")]


def choose_compile(wanted: str, device: Device) -> tuple[str, str]:
    """How steps are sent to the device, and why."""
    if "graph" in wanted and not device.records_graphs:
        raise ConfigError(f"train.compile {wanted} cannot be had on {device.kind}.", hint="--set train.compile=auto")
    if "compiled" in wanted and (fault := fault_in_compiling(device)):
        rest = "graph" if "graph" in wanted else "none"
        return rest, f"{wanted} was asked for, but nothing can be compiled here ({fault})"
    if wanted != AUTO:
        return wanted, "asked for"
    if device.records_graphs:
        return "graph", "a recorded step spends no time on launches; lapclip tune --seconds 300 tries compiling"
    return "none", "recording cannot be had here; lapclip tune --seconds 300 tries compiling"


def fault_in_compiling(device: Device) -> str | None:
    """Why torch.compile does not work here, if so: it needs a C++ compiler on the CPU and Triton on CUDA."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device.torch))
    except Exception as error:  # it has many ways to fail, and any of them means the same
        return first_line(error)
    return None


def prepare(device: Device, threads: int) -> None:
    """Fix what results depend on: the thread count, and on the CPU deterministic algorithms."""
    torch.set_num_threads(threads)
    # On accelerators this would forbid fast kernels, and results there differ between machines anyway.
    torch.use_deterministic_algorithms(device.is_cpu)
    # Filling every new tensor is for finding bugs; it costs time and changes no result.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (unknown to its type stubs)
    if device.kind == "mps":
        # By default the allocator takes 1.7 times the recommended size, and the system swaps instead of refusing.
        torch.mps.set_per_process_memory_fraction(1.0)
    keep_freed_memory()


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


def _give_back_freed_memory() -> None:
    """The opposite, where memory has become scarce: what is free between two blocks goes back too."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)  # glibc's
        except (OSError, AttributeError):
            pass


def default_threads() -> int:
    """torch's own choice: the performance cores."""
    return _OWN_THREADS

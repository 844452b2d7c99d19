"""What torch can compute on here. The only file that knows how CPU, CUDA, MPS and XPU differ.

Run on CPU and CUDA; the MPS and XPU paths are written from documentation and have not been run on such hardware.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapclip.config import AUTO
from lapclip.errors import ConfigError
from lapclip.machine import facts

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    def fused_adamw(self) -> bool:
        """Whether AdamW's fused form is right here. On MPS it ignored found_inf (pytorch issue 186360)."""
        return self.kind != "mps"

    @property
    def records_graphs(self) -> bool:
        """Whether a whole update can be recorded and replayed."""
        return self.kind == "cuda"

    @property
    def pins_memory(self) -> bool:
        """Whether copies from memory that the system may not move can be had; where memory is shared, none are made."""
        return self.kind in ("cuda", "xpu")

    @property
    def shares_memory(self) -> bool:
        """Whether the device works in the machine's own memory."""
        return self.kind in ("cpu", "mps")

    def forget_peak(self) -> None:
        """Count the peak from here, where the allocator keeps one."""
        if self.kind in ("cuda", "xpu"):
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

    def peak_memory_bytes(self) -> int:
        """The most memory training has held: the process's on the CPU, the allocator's on an accelerator."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated()
        if self.kind == "xpu":
            return torch.xpu.max_memory_allocated()
        if self.kind == "mps":
            return torch.mps.driver_allocated_memory()  # MPS keeps no peak; the driver rarely gives memory back
        return facts.peak_memory_bytes()


class SideBySide:
    """Two computations at once on CUDA, where small ones leave most of the chip idle; elsewhere one after the other.

    Their backward passes run at once too: torch sends each to where its forward pass ran.
    """

    def __init__(self, device: Device, *, at_once: bool) -> None:
        self._stream = torch.cuda.Stream() if at_once and device.kind == "cuda" else None

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
    """On MPS attention has been silently wrong for permuted inputs (pytorch issues 163597, 181133)."""
    return tensor.contiguous() if tensor.device.type == "mps" else tensor


def trusts_is_causal(device: torch.device) -> bool:
    """On MPS `is_causal` has let half-precision queries see later keys (pytorch issue 195910)."""
    return device.type != "mps"


def choose_device(wanted: str) -> tuple[Device, str]:
    """The device to train on, and why."""
    # Without the check a CUDA build on a machine without a GPU names cuda.
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted == AUTO:
        if found is None:
            return Device("cpu"), "torch finds no accelerator here"
        return Device(
            found.type
        ), f"torch finds this accelerator; --set train.device=cpu overrides, {found.type} is not timed"
    if wanted == "cpu":
        return Device("cpu"), "asked for"
    if found is None or wanted not in ("accelerator", found.type):
        here = found.type if found else "none"
        raise ConfigError(
            f"train.device {wanted} is not here (accelerator found: {here}).", hint="--set train.device=auto"
        )
    return Device(found.type), "asked for"


def choose_compile(wanted: str, device: Device) -> tuple[str, str]:
    """How steps are sent to the device, and why."""
    if "graph" in wanted and not device.records_graphs:
        raise ConfigError(f"train.compile {wanted} cannot be had on {device.kind}.", hint="--set train.compile=auto")
    if "compiled" in wanted and (fault := _fault_in_compiling(device)):
        rest = "graph" if "graph" in wanted else "none"
        return rest, f"{wanted} was asked for, but nothing can be compiled here ({fault})"
    if wanted != AUTO:
        return wanted, "asked for"
    if device.records_graphs:
        return "graph", "a recorded step spends no time on launches; compiling is not timed yet"
    return "none", "recording cannot be had here; compiling is not timed yet"


def _fault_in_compiling(device: Device) -> str | None:
    """Why torch.compile does not work here, if so: it needs a C++ compiler on the CPU and Triton on CUDA."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device.torch))
    except Exception as error:  # it has many ways to fail, and any of them means the same
        return str(error).strip().splitlines()[0][:120]
    return None


def prepare(device: Device, threads: int) -> None:
    """Fix what results depend on: the thread count, and on the CPU deterministic algorithms."""
    torch.set_num_threads(threads)
    # On accelerators this would forbid fast kernels, and results there differ between machines anyway.
    torch.use_deterministic_algorithms(device.is_cpu)
    # Filling every new tensor is for finding bugs; it costs time and changes no result.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (unknown to its type stubs)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
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


def default_threads() -> int:
    """torch's own choice: the performance cores."""
    return torch.get_num_threads()

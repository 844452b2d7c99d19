"""What to do when training fails for want of memory, or because the device cannot do it.

Pure decisions: which kind of failure an error is, and which settings to change. `recovery.py` acts on them.

    out of memory         halve micro_batch; the batch the loss compares, and so the result, stays the same
    swap                  the same, where the system swaps instead of refusing memory
    missing operation     go on on the CPU
    device error          go on on the CPU
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lapclip.config import TrainConfig
from lapclip.errors import LapclipError
from lapclip.machine.choose_device import device_of
from lapclip.machine.cpu import Cpu

MEMORY, SWAP, OPERATION, DEVICE = "out of memory", "swap", "missing operation", "device error"

OUT_OF_MEMORY = (
    "out of memory",  # CUDA, XPU, MPS ("MPS backend out of memory"), and CUDA's own error of that name
    "can't allocate memory",  # torch's allocator for the CPU on Linux and macOS
    "not enough memory",  # the same on Windows
    "cannot allocate memory",  # the system's own message
    "bad_alloc",  # a C++ library's
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED and its relatives: a library got no memory for itself
    "out_of_device_memory",  # XPU's runtime
    "out_of_host_memory",
    "could not create a primitive",  # oneDNN's only message for it, seen under a limit
    "invalid buffer size",  # MPS, for a single tensor that is larger than it can have
)
NO_SUCH_OPERATION = (
    "not currently implemented for the mps device",
    "not implemented for",
    "not supported on",
    "doesn't support float64",
    "could not run 'aten::",  # torch's dispatcher: no kernel for the device
    "mps: unsupported",
)
FAILED_DEVICE = (
    "cuda error",
    "cuda driver error",
    "device-side assert",
    "cublas_status",
    "cudnn_status",
    "cudnn error",
    "cusolver error",
    "illegal memory access",
    "xpu error",
    "ur_result_error",
    "level-zero",
    "sycl",
)
MPS = re.compile(r"\bmps\b")
"""Whatever else MPS complains of."""


ENFORCED = re.compile(r"^\[enforce fail at [^\]]*\] .*?\. (?=\w)")
"""Where in torch's source the CPU's allocator complains, which says nothing to a user."""


class SwapGrew(Exception):
    """The system puts memory on disk because of this process. Raised between steps, when all is in order."""


@dataclass(frozen=True)
class Change:
    """How a run goes on: the settings of `train` that change, and why."""

    cause: str
    settings: dict[str, Any]
    text: str
    """A sentence for the user."""


def cause_of(error: BaseException) -> str | None:
    """Which kind of failure this is; None where a fallback would not help.

    What led to an error counts before the error itself: ending a recording after running out of memory fails too.
    """
    chain = list(_chain(error))
    if any(isinstance(link, LapclipError) for link in chain):
        return None  # already explained
    causes = [_cause(link) for link in chain]
    return next((kind for kind in (SWAP, MEMORY, OPERATION, DEVICE) if kind in causes), None)


def decide(error: BaseException, train: TrainConfig, step: int) -> Change | None:
    """What to change after a failure in that step, and None where nothing would help."""
    cause = cause_of(error)
    if cause in (MEMORY, SWAP):
        return _halve(cause, error, train, step)
    device = device_of(train.device)
    if cause is None or device.is_cpu:
        return None
    what = "lacks an operation" if cause == OPERATION else "failed"
    # float32 and torch's own forms are what every CPU computes, and no less exact than what the device did.
    forms = {"image_attention": "fused", "text_attention": "fused", "linear": "torch"}
    settings = {"device": Cpu.kind, "dtype": "float32", "compile": "none", **forms}
    changed = {name: value for name, value in settings.items() if getattr(train, name) != value}
    return Change(
        cause,
        changed,
        f"{device.kind} {what} at step {step:,} ({brief(error)}); the CPU takes over",
    )


def smaller(train: TrainConfig) -> int | None:
    """Half the micro-batch, or None where it is one pair already. A batch that is cut goes through the towers shard by
    shard, so a micro-batch is never more than a shard then."""
    now = min(train.micro_batch or train.batch_size, train.batch_size)
    if train.micro_batch and train.shards > 1:
        now = min(now, -(-train.batch_size // train.shards))
    return now // 2 if now > 1 else None


def brief(error: BaseException) -> str:
    """The first line of an error, short enough for a sentence."""
    lines = ENFORCED.sub("", str(error).strip()).splitlines()
    first = (lines[0] if lines else type(error).__name__).rstrip(".")
    return first if len(first) <= 160 else f"{first[:157]}..."


def _halve(cause: str, error: BaseException, train: TrainConfig, step: int) -> Change | None:
    now, half = min(train.micro_batch or train.batch_size, train.batch_size), smaller(train)
    if half is None:
        return None
    what = "out of memory" if cause == MEMORY else "the system began to swap"
    text = f"{what} at step {step:,} ({brief(error)}); micro_batch {now:,} becomes {half:,}, the result stays the same"
    return Change(cause, {"micro_batch": half}, text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it arose from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _cause(error: BaseException) -> str | None:
    if isinstance(error, SwapGrew):
        return SWAP
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MEMORY
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return MEMORY
    if not isinstance(error, RuntimeError | TypeError):  # NotImplementedError is a RuntimeError
        return None
    message = str(error).lower()
    if any(phrase in message for phrase in OUT_OF_MEMORY):
        return MEMORY
    if isinstance(error, NotImplementedError) or any(
        phrase in message for phrase in NO_SUCH_OPERATION
    ):
        return OPERATION
    # Older releases of torch have no class of its own for a device's errors.
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return DEVICE
    failed = any(phrase in message for phrase in FAILED_DEVICE) or MPS.search(message)
    return DEVICE if isinstance(error, RuntimeError) and failed else None

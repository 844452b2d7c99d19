"""Devices by name: which one to compute on and why, how steps are sent to it, and what is set up before it computes."""

from __future__ import annotations

import torch

from lapclip.config import AUTO, TrainConfig
from lapclip.errors import ConfigError, first_line
from lapclip.machine import gpus  # noqa: F401 (its classes register themselves)
from lapclip.machine.cpu import Cpu, keep_freed_memory
from lapclip.machine.device import DTYPES, KINDS, UNTRUSTED, Device

ACCELERATOR = "accelerator"
"""The value of train.device that takes whatever accelerator there is."""

_OWN_THREADS = torch.get_num_threads()  # before anything changes it


def device_of(kind: str) -> Device:
    """Return the device of this kind, whether or not it is here."""
    return KINDS[kind]()


def accelerator_here() -> Device | None:
    """What torch can use beside the CPU."""
    # Without the check a CUDA build on a machine without a GPU names cuda.
    found = torch.accelerator.current_accelerator(check_available=True)
    return device_of(found.type) if found is not None and found.type in KINDS else None


def find_device(asked: str, setting: str = "train.device") -> Device:
    """The device that a setting names, before anything is computed there; one that is not here is refused."""
    device = Cpu() if asked == Cpu.kind else accelerator_here()
    if asked == AUTO and device is None:
        return Cpu()
    if device is None or asked not in (AUTO, ACCELERATOR, device.kind):
        here = device.kind if device else "none"
        raise ConfigError(
            f"{setting} {asked} is not here (accelerator found: {here}).",
            hint=f"--set {setting}=auto",
        )
    return device


def choose_device(asked: str, setting: str = "train.device") -> tuple[Device, str]:
    """Return the device to compute on, and the reason."""
    device = find_device(asked, setting)
    if device.is_cpu:
        return device, "asked for" if asked == Cpu.kind else "no GPU found"
    device.examine("float32", device.half)
    unfit = device.unfit()
    if asked != AUTO:
        return device, f"asked for, although {unfit}" if unfit else "asked for"
    if unfit:
        return Cpu(), unfit
    return (
        device,
        "torch finds this accelerator; the run is too short to time others, lapclip tune does",
    )


def available(asked: str = AUTO) -> list[Device]:
    """The devices that a setting of train.device allows here, the accelerator first."""
    found, _ = choose_device(asked)
    return [found] if asked != AUTO or found.is_cpu else [found, Cpu()]


def choose_train_device(train: TrainConfig) -> tuple[Device, str]:
    """Return the device to train on, checked in the precision of the run, and the reason."""
    device, reason = choose_device(train.device)
    examine_precision(device, train.dtype)
    return device, reason


def candidates(train: TrainConfig) -> list[Device]:
    """Return the devices that the settings allow here, the accelerator first."""
    devices = available(train.device)
    for device in devices:
        examine_precision(device, train.dtype)
    return devices


def examine_precision(device: Device, dtype: str) -> None:
    """Check what a device computes in the precision that a run asks for, so that it avoids what is wrong there from its
    first step on, and again when it is resumed."""
    if dtype != AUTO:
        device.examine(str(DTYPES[dtype]).removeprefix("torch."))


def choose_compile(asked: str, device: Device) -> tuple[str, str]:
    """How steps are sent to the device, and why."""
    if "graph" in asked and not device.records_graphs:
        raise ConfigError(
            f"train.compile {asked} cannot be had on {device.kind}.",
            hint="--set train.compile=auto",
        )
    if "compiled" in asked and (fault := fault_in_compiling(device)):
        rest = "graph" if "graph" in asked else "none"
        return rest, f"{asked} was asked for, but nothing can be compiled here ({fault})"
    if asked != AUTO:
        return asked, "asked for"
    if device.records_graphs:
        return (
            "graph",
            "a recorded step spends no time on launches; lapclip tune --seconds 300 tries compiling",
        )
    return "none", "recording cannot be had here; lapclip tune --seconds 300 tries compiling"


def fault_in_compiling(device: Device) -> str | None:
    """Why torch.compile does not work here, if so: it needs a C++ compiler on the CPU and Triton on CUDA."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device.torch))
    except Exception as error:  # it has many ways to fail, and any of them means the same
        return first_line(error)
    return None


def prepare_device(device: Device, threads: int) -> None:
    """Set what results depend on: the thread count, and deterministic algorithms where the device is to have them."""
    torch.set_num_threads(threads)
    # As `use_deterministic_algorithms`, which would load torch's compiler too: seconds, for runs that compile nothing.
    torch.set_deterministic_debug_mode("error" if device.is_deterministic else "default")
    # Filling every new tensor is for finding bugs; it costs time and changes no result.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (unknown to its type stubs)
    device.limit_memory()
    keep_freed_memory()


def use_threads(count: int) -> None:
    """Set how many threads torch computes with where the calling thread asks it, and only there."""
    # A thread's first question takes over what was set last anywhere: it has to come before the setting, not after it.
    torch.get_num_threads()
    torch.set_num_threads(count)


def default_threads() -> int:
    """torch's own choice: the performance cores."""
    return _OWN_THREADS


# What `model/kernels.py` asks in every layer about the device a tensor lies on: one lookup in a table.


def ready_for_attention(tensor: torch.Tensor) -> torch.Tensor:
    """Laid out anew where permuted inputs give wrong results."""
    return (
        tensor.contiguous() if (tensor.device.type, "permuted attention") in UNTRUSTED else tensor
    )


def trusts_is_causal(device: torch.device) -> bool:
    """Whether `is_causal` may be used there; a mask says the same."""
    return (device.type, "causal attention") not in UNTRUSTED


def trusts_one_query_without_keys(device: torch.device) -> bool:
    """Whether the attention of one query may be computed there without keys and values."""
    return (device.type, "one query without keys") not in UNTRUSTED


def norms_mixed_dtypes(device: torch.device) -> bool:
    """Whether layer norm takes half-precision inputs with float32 weights, and sums in float32 itself."""
    return KINDS.get(device.type, Device).norms_mixed_dtypes


def runs_onednn(device: torch.device) -> bool:
    """Whether oneDNN's kernels compute there, in builds of torch that carry the library."""
    return KINDS.get(device.type, Device).runs_onednn


def recomputes_gelu(device: torch.device) -> bool:
    """Whether the backward pass computes GELU again sooner than it reads what the forward pass would have to keep."""
    return KINDS.get(device.type, Device).recomputes_gelu


def runs_triton(device: torch.device) -> bool:
    """Whether kernels written in Triton can be compiled for it here."""
    return KINDS.get(device.type, Device).runs_triton

"""Everything that `lapclip machine` shows. Unknown facts are None, and nothing here raises for want of one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lapclip.machine.accelerators import accelerators
from lapclip.machine.checks import canary_check, checks
from lapclip.machine.facts import machine_facts, processor
from lapclip.machine.power import power
from lapclip.machine.sensors import Sensors
from lapclip.machine.system_memory import available_bytes
from lapclip.progress import Status

if TYPE_CHECKING:
    from lapclip.machine.device import Device

SECONDS = 0.5
"""How long the load on the cores and the power are watched."""


def overview(status: Status = lambda _: None) -> dict[str, Any]:
    """The machine and its check list, as one object."""
    status("asking the system")
    facts = {**machine_facts(), **asdict(processor()), **_memory(), **_power(), **_watched()}
    facts["accelerators"] = accelerators()
    status("asking torch")
    facts["torch"] = torch_build()
    device = _accelerator() if facts["torch"] else None
    if device and not facts["accelerators"]:
        facts["accelerators"] = device.listed()
    listed = checks(facts)
    if device:
        status("checking that the accelerator computes what the CPU computes")
        failures = [result.sentence() for result in device.examine() if not result.ok]
        listed.append(canary_check(device.kind, len(device.examine()), failures))
    return {**facts, "checks": [asdict(check) for check in listed]}


def torch_build() -> dict[str, Any] | None:
    """Version, threads, the vector unit it uses and the accelerator it finds; None where it is not installed."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: installed, with a library missing
        return None
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "vectors": _answer_of(lambda: torch.backends.cpu.get_cpu_capability()),
        "cuda": _answer_of(lambda: torch.version.cuda),
        "hip": _answer_of(lambda: torch.version.hip),
        "accelerator": _answer_of(
            lambda: getattr(torch.accelerator.current_accelerator(check_available=True), "type", None)
        ),
    }


def _answer_of(question: Callable[[], str | None]) -> str | None:
    """The answer; None from a release of torch that is too old to be asked, or a driver that fails."""
    try:
        return question()
    except (AttributeError, TypeError, RuntimeError):
        return None


def _accelerator() -> Device | None:
    from lapclip.machine.choose_device import accelerator_here

    try:
        return accelerator_here()
    except (AttributeError, RuntimeError):  # a release of torch that is too old to be asked, or a driver that fails
        return None


def _memory() -> dict[str, int | None]:
    swap_total, swap_used, disk = None, None, None
    with suppress(OSError, RuntimeError):  # containers may hide it
        swap = psutil.swap_memory()
        swap_total, swap_used = swap.total, swap.used
    with suppress(OSError):  # the folder may be gone
        disk = shutil.disk_usage(Path.cwd()).free
    return {
        "memory_free_bytes": available_bytes(),
        "swap_bytes": swap_total,
        "swap_used_bytes": swap_used,
        "disk_free_bytes": disk,
    }


def _power() -> dict[str, Any]:
    found = power()
    return {
        "power_source": found.source,
        "battery_percent": found.battery_percent,
        "low_power_mode": found.low_power_mode,
    }


def _watched() -> dict[str, Any]:
    """What takes a moment to see: the load on the cores (this process only waits), watts and throttling."""
    sensors, began = Sensors(), time.perf_counter()
    time.sleep(SECONDS)
    seen, seconds = sensors.sample(), time.perf_counter() - began
    watts = {name: round(joules / seconds, 1) for name, joules in seen.joules.items()} if seen.joules else None
    return {
        "load": sum(seen.core_use) / len(seen.core_use) if seen.core_use else None,
        "watts": watts,
        "energy_reason": seen.reason,
        "throttled": seen.throttled,
        "celsius": seen.celsius,
        "megahertz": seen.megahertz,
    }

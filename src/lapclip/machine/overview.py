"""Everything that `lapclip machine` shows: the facts, and whether the machine is ready to train, as a list of checks.

Unknown facts are None, and nothing here raises for want of one.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lapclip.machine.facts import accelerators, logical_cores, machine_facts
from lapclip.machine.other_programs import BUSY_SHARE
from lapclip.machine.sensors import Sensors, power
from lapclip.machine.system_memory import available_bytes
from lapclip.progress import Status
from lapclip.text import gigabytes

if TYPE_CHECKING:
    from lapclip.machine.device import Device


SECONDS = 0.5
"""How long the load on the cores and the power are watched."""


def overview(status: Status = lambda _: None) -> dict[str, Any]:
    """The machine and its check list, as one object."""
    status("asking the system")
    facts = {**machine_facts(), **_memory(), **_power(), **_watched()}
    facts["physical_cores"] = psutil.cpu_count(logical=False)
    facts["usable_cores"] = logical_cores()
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
    """Return torch's version, threads, vector unit and accelerator. None if it is not installed."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: installed, with a library missing
        return None
    device = _accelerator()
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "accelerator": device.kind if device else None,
    }


def _accelerator() -> Device | None:
    from lapclip.machine.choose_device import accelerator_here

    try:
        return accelerator_here()
    except RuntimeError:  # a driver that fails
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
    watts = (
        {name: round(joules / seconds, 1) for name, joules in seen.joules.items()}
        if seen.joules
        else None
    )
    return {
        "load": sum(seen.core_use) / len(seen.core_use) if seen.core_use else None,
        "watts": watts,
        "energy_reason": seen.reason,
        "throttled": seen.throttled,
        "celsius": seen.celsius,
        "megahertz": seen.megahertz,
    }


NEEDED_MEMORY = 1_000_000_000
"""Bytes the default recipe wants free: its run peaks at 0.7 GB on the CPU (README.md)."""
NEEDED_DISK = 1_000_000_000
"""Bytes a default run wants: images, two checkpoints and the environment's temporary files, with room to spare."""
PYTHON = (3, 11)
SWAPPED = 500_000_000
"""Bytes of swap that systems use without being short of memory."""


@dataclass(frozen=True)
class Check:
    """One line of the list; ok is None where it is unknown."""

    name: str
    ok: bool | None
    text: str


def checks(facts: dict[str, Any]) -> list[Check]:
    """The list for these facts, as `machine/overview.py` gathers them."""
    return [
        _python(facts["python"]),
        _torch(facts["torch"], facts["system"]),
        _room(
            "memory",
            facts["memory_free_bytes"],
            NEEDED_MEMORY,
            "free; the default recipe takes about 1 GB",
        ),
        _room(
            "disk",
            facts["disk_free_bytes"],
            NEEDED_DISK,
            "free in this folder; a default run takes under 1 GB",
        ),
        _battery(facts["power_source"], facts["battery_percent"]),
        _low_power(facts["low_power_mode"]),
        _load(facts["load"]),
        _swap(facts["swap_used_bytes"]),
        _throttling(facts["throttled"], facts["celsius"]),
        *_usable(facts["accelerators"], facts["torch"]),
    ]


def canary_check(kind: str, total: int, failures: list[str]) -> Check:
    """Whether an accelerator computes what it should."""
    if failures:
        return Check(
            f"{kind} canary",
            False,
            f"{len(failures)} of {total} checks fail: {'; '.join(failures)}",
        )
    return Check(f"{kind} canary", True, f"all {total} operations checked agree with the CPU")


def _python(version: str) -> Check:
    needed = ".".join(map(str, PYTHON))
    return Check(
        "python", _numbers(version) >= PYTHON, f"Python {version}; lapclip needs {needed} or later"
    )


def _torch(build: dict[str, Any] | None, system: str) -> Check:
    floor = (2, 13) if system.startswith("Darwin") else (2, 11)
    needed = ".".join(map(str, floor))
    if build is None:
        return Check(
            "torch",
            False,
            f"not installed; lapclip needs {needed} or later to train: pip install torch",
        )
    ok = _numbers(build["version"]) >= floor
    return Check("torch", ok, f"torch {build['version']}; lapclip needs {needed} or later")


def _room(name: str, free: int | None, needed: int, text: str) -> Check:
    return Check(name, None if free is None else free >= needed, f"{gigabytes(free)} {text}")


def _battery(source: str | None, percent: float | None) -> Check:
    left = f" ({percent:.0f} % left)" if percent is not None else ""
    if source is None:
        return Check("power", None, f"unknown whether on mains or battery{left}")
    text = (
        f"on battery{left}: slower on many laptops; plug it in"
        if source == "battery"
        else f"on mains{left}"
    )
    return Check("power", source == "mains", text)


def _low_power(on: bool | None) -> Check:
    texts = {
        None: "unknown",
        True: "on: the cores are held back; switch it off to train",
        False: "off",
    }
    return Check("low-power mode", None if on is None else not on, texts[on])


def _load(share: float | None) -> Check:
    if share is None:
        return Check("other load", None, "unknown")
    text = f"other programs use {share:.0%} of the cores"
    return Check(
        "other load",
        share < BUSY_SHARE,
        text if share < BUSY_SHARE else f"{text}; training gets what is left",
    )


def _swap(used: int | None) -> Check:
    if used is None:
        return Check("swap", None, "unknown")
    short = used >= SWAPPED
    return Check(
        "swap",
        not short,
        f"{gigabytes(used)} in use{': memory is short; close programs' if short else ''}",
    )


def _throttling(throttled: bool | None, celsius: float | None) -> Check:
    at = f" at {celsius:.0f} C" if celsius is not None else ""
    texts = {None: "unknown", True: "the processor is held back because of heat", False: "none now"}
    return Check("throttling", None if throttled is None else not throttled, texts[throttled] + at)


def _usable(accelerators: list[dict[str, Any]], build: dict[str, Any] | None) -> Iterable[Check]:
    """Whether torch can use what the system shows."""
    if not accelerators:
        yield Check("accelerator", True, "none found; training uses the CPU")
    for there in {accelerator["kind"]: accelerator for accelerator in accelerators}.values():
        if build is None:
            yield Check("accelerator", None, f"{there['name']}: unknown until torch is installed")
        elif build["accelerator"] == there["kind"]:
            yield Check("accelerator", True, f"{there['name']}: torch can use it")
        else:
            yield Check("accelerator", False, f"{there['name']}: this build of torch cannot use it")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

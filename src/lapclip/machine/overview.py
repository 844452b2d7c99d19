"""Everything `lapclip machine` tells, gathered. Unknown facts are None, and nothing here raises for want of one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from lapclip.machine import torch_build as build
from lapclip.machine.accelerators import accelerators
from lapclip.machine.checks import Check, canary_check, checks
from lapclip.machine.facts import available_bytes, machine_facts
from lapclip.machine.power import power
from lapclip.machine.processor import processor
from lapclip.machine.sensors import Sensors

SECONDS = 0.5
"""How long the load on the cores and the power are watched."""

Told = Callable[[str], None]
"""Called with what is being done."""


def overview(told: Told = lambda _: None) -> dict[str, Any]:
    """The machine and its check list, as one object."""
    told("asking the system")
    facts = {**machine_facts(), **asdict(processor()), **_memory(), **_power(), **_watched()}
    facts["accelerators"] = accelerators()
    told("asking torch")
    facts["torch"] = build.torch_build()
    if facts["torch"] and facts["torch"]["accelerator"] and not facts["accelerators"]:
        facts["accelerators"] = build.torch_accelerators()
    listed = checks(facts)
    if facts["torch"] and facts["torch"]["accelerator"]:
        told("checking that the accelerator computes what the CPU computes")
        listed.append(_canary(facts["torch"]["accelerator"]))
    return {**facts, "checks": [asdict(check) for check in listed]}


def _canary(kind: str) -> Check:
    from lapclip.machine.devices import Device

    device = Device(kind)
    results = device.examine()
    return canary_check(kind, len(results), [result.sentence() for result in device.failures()])


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

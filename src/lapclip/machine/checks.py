"""Whether this machine is ready to train, as a list of checks. Functions of the facts alone. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lapclip.machine.timing import BUSY

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
        _room("memory", facts["memory_free_bytes"], NEEDED_MEMORY, "free; the default recipe takes about 1 GB"),
        _room("disk", facts["disk_free_bytes"], NEEDED_DISK, "free in this folder; a default run takes under 1 GB"),
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
        return Check(f"{kind} canary", False, f"{len(failures)} of {total} checks fail: {'; '.join(failures)}")
    return Check(f"{kind} canary", True, f"all {total} operations checked agree with the CPU")


def gigabytes(count: int | None) -> str:
    """Bytes for people."""
    return "unknown" if count is None else f"{count / 1e9:.1f} GB"


def _python(version: str) -> Check:
    needed = ".".join(map(str, PYTHON))
    return Check("python", _numbers(version) >= PYTHON, f"Python {version}; lapclip needs {needed} or later")


def _torch(build: dict[str, Any] | None, system: str) -> Check:
    floor = (2, 13) if system.startswith("Darwin") else (2, 11)
    needed = ".".join(map(str, floor))
    if build is None:
        return Check("torch", False, f"not installed; lapclip needs {needed} or later to train: pip install torch")
    ok = _numbers(build["version"]) >= floor
    return Check("torch", ok, f"torch {build['version']}; lapclip needs {needed} or later")


def _room(name: str, free: int | None, needed: int, text: str) -> Check:
    return Check(name, None if free is None else free >= needed, f"{gigabytes(free)} {text}")


def _battery(source: str | None, percent: float | None) -> Check:
    left = f" ({percent:.0f} % left)" if percent is not None else ""
    if source is None:
        return Check("power", None, f"unknown whether on mains or battery{left}")
    text = f"on battery{left}: slower on many laptops; plug it in" if source == "battery" else f"on mains{left}"
    return Check("power", source == "mains", text)


def _low_power(on: bool | None) -> Check:
    texts = {None: "unknown", True: "on: the cores are held back; switch it off to train", False: "off"}
    return Check("low-power mode", None if on is None else not on, texts[on])


def _load(share: float | None) -> Check:
    if share is None:
        return Check("other load", None, "unknown")
    text = f"other programs use {share:.0%} of the cores"
    return Check("other load", share < BUSY, text if share < BUSY else f"{text}; training gets what is left")


def _swap(used: int | None) -> Check:
    if used is None:
        return Check("swap", None, "unknown")
    short = used >= SWAPPED
    return Check("swap", not short, f"{gigabytes(used)} in use{': memory is short; close programs' if short else ''}")


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

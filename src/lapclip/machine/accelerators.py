"""The accelerators of this machine, as the system names them. No torch."""

from __future__ import annotations

import csv
import json
import sys
from typing import Any

from lapclip.machine import nvml
from lapclip.machine.ask_system import output_of

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits")


def accelerators() -> list[dict[str, Any]]:
    """The accelerators that the system shows, named as torch names their kind."""
    if sys.platform == "darwin":
        return parse_system_profiler(output_of("system_profiler", "-json", "SPDisplaysDataType", seconds=15) or "")
    driver = nvml.driver()
    found = [
        accelerator("cuda", gpu.name or "NVIDIA GPU", *gpu.memory, driver=driver, shares_memory=False)
        for gpu in nvml.gpus()
    ]
    return found or parse_nvidia_smi(output_of(*NVIDIA_SMI, seconds=15) or "")


def accelerator(
    kind: str,
    name: str,
    memory_bytes: int | None = None,
    free_bytes: int | None = None,
    *,
    driver: str | None = None,
    shares_memory: bool | None = None,
) -> dict[str, Any]:
    """One accelerator, as `lapclip machine --json` lists it; None is unknown."""
    return {
        "kind": kind,
        "name": name,
        "memory_bytes": memory_bytes,
        "free_bytes": free_bytes,
        "shares_memory": shares_memory,
        "driver": driver,
    }


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """The rows of nvidia-smi: name, MiB in all, MiB free, driver. What a card does not know it writes in brackets."""
    rows = (row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4)
    return [
        accelerator("cuda", name, _mebibytes(total), _mebibytes(free), driver=driver, shares_memory=False)
        for name, total, free, driver in rows
    ]


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.strip().isdigit() else None


def parse_system_profiler(text: str) -> list[dict[str, Any]]:
    """The GPUs that macOS lists. Those in Apple's chips use the machine's own memory; the driver is the system's."""
    try:
        listed = json.loads(text)["SPDisplaysDataType"]
    except (ValueError, KeyError, TypeError):
        return []
    found = []
    for card in listed:
        name = card.get("sppci_model") or card.get("_name") or "GPU"
        if cores := card.get("sppci_cores"):
            name = f"{name}, {cores} GPU cores"
        metal = card.get("spdisplays_mtlgpufamilysupport") or card.get("spdisplays_metal") or ""
        driver = metal.removeprefix("spdisplays_").replace("metal", "Metal ").strip() or None
        apple = "apple" in (card.get("spdisplays_vendor") or name).lower()
        found.append(accelerator("mps", name, driver=driver, shares_memory=True if apple else None))
    return found

"""What torch is here, if any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lapclip.machine.accelerators import accelerator


def torch_build() -> dict[str, Any] | None:
    """Version, threads, the vector unit it uses and the accelerator it finds; None where it is not installed."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: installed, with a library missing
        return None
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "vectors": _asked(lambda: torch.backends.cpu.get_cpu_capability()),
        "cuda": _asked(lambda: torch.version.cuda),
        "hip": _asked(lambda: torch.version.hip),
        "accelerator": _asked(
            lambda: getattr(torch.accelerator.current_accelerator(check_available=True), "type", None)
        ),
    }


def _asked(question: Callable[[], str | None]) -> str | None:
    """The answer; None from a release of torch that is too old to be asked, or a driver that fails."""
    try:
        return question()
    except (AttributeError, TypeError, RuntimeError):
        return None


def torch_accelerators() -> list[dict[str, Any]]:
    """The accelerators torch can use: what is left to say where the system names none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    if found.type == "mps":
        total = torch.mps.recommended_max_memory()
        return [accelerator("mps", "Apple GPU", total, shares_memory=True)]
    listed = []
    for index in range(torch.accelerator.device_count()):
        facts = torch.get_device_module(found.type).get_device_properties(index)
        driver = torch.version.hip if torch.version.hip else getattr(facts, "driver_version", None)
        listed.append(accelerator(found.type, facts.name, getattr(facts, "total_memory", None), driver=driver))
    return listed

"""What torch is here, if any."""

from __future__ import annotations

from typing import Any

from lapclip.machine.accelerators import accelerator


def torch_build() -> dict[str, Any] | None:
    """Version, threads, the vector unit it uses and the accelerator it finds; None where it is not installed."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: installed, with a library missing
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "accelerator": found.type if found else None,
    }


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

"""`lapclip compare`: the devices of this machine side by side."""

from __future__ import annotations

from typing import Any

from lapclip.errors import ConfigError
from lapclip.machine.choose_device import available
from lapclip.paths import CacheFile
from lapclip.progress import Status
from lapclip.training.distributed import joined_ranks
from lapclip.tuning.compare import QUICK_SECONDS, SECONDS, compare_devices
from lapclip.tuning.compare_machines import compare_together
from lapclip.tuning.rehearsal import measure_phases


def compare(*, quick: bool, seconds: float | None, progress: Status) -> dict[str, Any]:
    """Compare the devices of this machine and save the result for `report`."""
    if seconds is not None and seconds <= 0:
        raise ConfigError(
            f"--seconds must be more than 0, not {seconds:g}.", hint="lapclip compare --quick"
        )
    usual_seconds = QUICK_SECONDS if quick else SECONDS
    found = compare_devices(seconds or usual_seconds, progress)
    saved = CacheFile("compare.json")
    saved.replace(found)  # before the rest: what took minutes is not to be lost
    if not quick:
        found["phases"] = {}
        for device in available():
            progress(f"phases of a step on {device.kind}")
            found["phases"][device.kind] = measure_phases(device)
        saved.replace(found)
    return found


def compare_machines(progress: Status) -> dict[str, Any] | None:
    """Under torchrun, time several machines together. None on ranks that do not report."""
    with joined_ranks() as ranks:
        found = compare_together(ranks, progress)
    return found if ranks.writes else None

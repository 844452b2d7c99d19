"""Whether other programs use the cores: what is timed then says little. No torch."""

from __future__ import annotations

import psutil

BUSY = 0.25
"""Share of the cores that others may use before a run is clearly slower for it."""
SECONDS = 0.3


def other_load(seconds: float = SECONDS) -> float | None:
    """The share of all cores that others use while this process waits; None where the system does not tell."""
    try:
        return psutil.cpu_percent(interval=seconds) / 100
    except (OSError, RuntimeError):
        return None


def busy_cores() -> str | None:
    """A sentence if others are at work, for whoever is about to time something."""
    share = other_load()
    if share is None or share < BUSY:
        return None
    return f"other programs use {share:.0%} of the cores, so what is timed now is off"

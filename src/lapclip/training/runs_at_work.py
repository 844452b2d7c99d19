"""Who trains on this computer now: runs in any folder, so that two that compete can be told."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from lapclip.paths import cache_folder
from lapclip.runs.heartbeat import Beat, read_beat


def own_sign() -> Path:
    """Where this process says that it is at work."""
    return cache_folder() / "at-work" / f"{platform.node()} {os.getpid()}.json"


def others_at_work() -> list[Beat]:
    """The other processes that say so and live; what the dead left behind is removed."""
    found = []
    for path in sorted(own_sign().parent.glob("*.json")):
        beat = read_beat(path)
        if beat is None or not beat.alive:
            with suppress(OSError):
                path.unlink()
        elif beat.host == platform.node() and beat.process != os.getpid():  # a home may be shared by computers
            found.append(beat)
    return found

"""What torchrun tells the processes that it starts. No torch."""

from __future__ import annotations

import json
import os
import sys

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
UNNAMED_JOB = "none"  # what torchrun calls a job without --rdzv-id


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return all(os.environ.get(name) for name in VARIABLES)


def job() -> str:
    """Return what the processes of one job of torchrun have in common: its name and their arguments."""
    return json.dumps([os.environ.get("TORCHELASTIC_RUN_ID", UNNAMED_JOB), *sys.argv[1:]])


def job_agent() -> int | None:
    """Return the process that tells a job without a name from others. None for a job with a name."""
    is_unnamed = os.environ.get("TORCHELASTIC_RUN_ID", UNNAMED_JOB) == UNNAMED_JOB
    return os.getppid() if is_unnamed else None


def will_restart() -> bool:
    """Return whether torchrun starts this process again if it fails."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))

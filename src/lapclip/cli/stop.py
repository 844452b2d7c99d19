"""`lapclip stop`."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed
from lapclip.cli.runs import run_row
from lapclip.errors import RunError

PATIENCE = 10.0
"""Seconds to wait for the end of a process that has saved: one in Python may go on with other things."""


def stop(run: str | None = None, /, *, common: Common | None = None) -> int:
    """Ask a running run to save and end, and wait until it has.

    For example:

    - `lapclip stop`
    - `lapclip stop first-run-2`

    Parameters
    ----------
    run
        The run's name; without one, the newest that is running.
    """
    from lapclip.runs.folder import find_active_run
    from lapclip.runs.heartbeat import read_beat

    found = find_active_run(run)
    if run is None:
        print(f"Stopping {found.path}.", file=sys.stderr)
    if found.state != "starting":
        found.read_settings()
    if found.state not in ("running", "starting"):
        raise RunError(f"{found.path} is not running; it is {found.state}.", hint="lapclip runs")
    found.ask_to_stop()
    beat = None
    try:
        with Console(stderr=True).status(f"{found.name} finishes its step and saves"):
            while found.state in ("running", "starting"):
                beat = read_beat(found.pulse) or beat
                time.sleep(0.2)
                if (
                    found.path.exists() and not found.stop_asked()
                ):  # a process that began just now forgot it
                    found.ask_to_stop()
            ends = time.monotonic() + PATIENCE
            while (
                beat
                and beat.is_here
                and beat.process != os.getpid()
                and beat.alive
                and time.monotonic() < ends
            ):
                time.sleep(0.05)  # it still has files of the run open
    except KeyboardInterrupt:
        told = f"Interrupted; {found.name} was asked to stop and will all the same. See: {typed('runs')}"
        raise KeyboardInterrupt(told) from None
    row = run_row(found)
    result = {"run": str(found.path), "state": row["state"], "step": row["step"]}
    next_command = typed(found.resume_command() if row["state"] == "stopped" else "runs")
    ending = [
        f"{found.path} is {row['state']} after step {row['step']:,}.",
        f"Next: {escape(next_command)}",
    ]
    emit(result, ending, common)
    return 0

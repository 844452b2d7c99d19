"""`lapclip stop`."""

from __future__ import annotations

import time

from rich.console import Console

from lapclip.cli.output import Common, emit, typed
from lapclip.cli.runs import run_row
from lapclip.errors import RunError


def stop(run: str | None = None, /, *, common: Common | None = None) -> int:
    """Ask a running run to save and end, and wait until it has.

    For example:

    - `lapclip stop`
    - `lapclip stop first-run-2`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    """
    from lapclip.runs.folder import find_run

    found = find_run(run)
    if found.state != "starting":
        found.read_settings()
    if found.state not in ("running", "starting"):
        raise RunError(f"{found.path} is not running; it is {found.state}.", hint="lapclip runs")
    found.ask_to_stop()
    try:
        with Console(stderr=True).status(f"{found.name} finishes its step and saves"):
            while found.state in ("running", "starting"):
                time.sleep(0.2)
    except KeyboardInterrupt:
        told = f"Interrupted; {found.name} was asked to stop and will all the same. See: {typed('runs')}"
        raise KeyboardInterrupt(told) from None
    if not found.path.exists():
        stopped = {"run": str(found.path), "state": "stopped", "step": 0}
        emit(stopped, [f"{found.path} was stopped before it began, and is gone.", f"Next: {typed('runs')}"], common)
        return 0
    row = run_row(found)
    result = {"run": str(found.path), "state": row["state"], "step": row["step"]}
    next_command = typed(f"resume {found.name}" if row["state"] == "stopped" else "runs")
    emit(result, [f"{found.path} is {row['state']} after step {row['step']:,}.", f"Next: {next_command}"], common)
    return 0

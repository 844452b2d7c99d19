"""`lapclip runs` and `lapclip stop`."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from rich.console import Console

from lapclip.cli.output import Common, emit, typed
from lapclip.errors import RunError
from lapclip.runs.folder import Run, all_runs, find_run
from lapclip.runs.follow import RunStatus


def runs(*, common: Common | None = None) -> int:
    """List the runs in this folder, the newest last.

    Example: `lapclip runs`
    """
    rows = [_row(run) for run in all_runs()]
    lines = [f"[bold]{'name':<24}{'state':<10}{'step':>14}  {'val R@1':>7}  {'started':<16}  age[/bold]"]
    for row in rows:
        progress = f"{row['step']:,}/{row['steps']:,}"
        best = f"{row['best']:.1%}" if row["best"] is not None else "-"
        started = datetime.fromtimestamp(row["started"]).strftime("%Y-%m-%d %H:%M") if row["started"] else "-"
        age = _age_text(row["age_seconds"]) if row["age_seconds"] is not None else "-"
        lines.append(f"{row['name']:<24}{row['state']:<10}{progress:>14}  {best:>7}  {started:<16}  {age}")
    unfinished = [row["name"] for row in rows if row["steps"] and row["state"] in ("died", "stopped", "failed")]
    ending = [f"Next: {typed(f'resume {unfinished[-1]}')}"] if unfinished else []
    emit({"runs": rows}, [*lines, *ending] if rows else ["No runs here yet.", f"Next: {typed('train')}"], common)
    return 0


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
    found = find_run(run)
    if found.state != "starting":
        found.read_settings()
    if found.state not in ("running", "starting"):
        raise RunError(f"{found.path} is not running; it is {found.state}.", hint="lapclip runs")
    found.ask_to_stop()
    with Console(stderr=True).status(f"{found.name} finishes its step and saves"):
        while found.state in ("running", "starting"):
            time.sleep(0.2)
    if not found.path.exists():
        stopped = {"run": str(found.path), "state": "stopped", "step": 0}
        emit(stopped, [f"{found.path} was stopped before it began, and is gone.", f"Next: {typed('runs')}"], common)
        return 0
    row = _row(found)
    result = {"run": str(found.path), "state": row["state"], "step": row["step"]}
    next_command = typed(f"resume {found.name}" if row["state"] == "stopped" else "runs")
    emit(result, [f"{found.path} is {row['state']} after step {row['step']:,}.", f"Next: {next_command}"], common)
    return 0


def _row(run: Run) -> dict[str, Any]:
    """A run as `lapclip runs` shows it."""
    status = RunStatus(run)
    status.refresh()
    row = status.row()
    del row["paused"]
    return {**row, "age_seconds": time.time() - row["started"] if row["started"] else None}


def _age_text(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

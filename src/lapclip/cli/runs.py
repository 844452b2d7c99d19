"""`lapclip runs`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from lapclip.cli.output import Common, emit, typed
from lapclip.text import moment, printable, short_duration

if TYPE_CHECKING:
    from lapclip.runs.folder import Run


def runs(*, common: Common | None = None) -> int:
    """List the runs in this folder, the newest last.

    Example: `lapclip runs`
    """
    from lapclip.runs.folder import RUNS, Run, all_runs

    rows = [run_row(run) for run in all_runs()]
    lines = [
        f"[bold]{'name':<24}{'state':<10}{'step':>14}  {'val R@1':>7}  {'of step':>7}  {'started':<16}  age[/bold]"
    ]
    for row in rows:
        progress = f"{row['step']:,}/{row['steps']:,}"
        if row["state"] == "finished" and row["step"] < row["steps"]:
            progress = f"{row['step']:,} (early)"
        best = f"{row['best']:.1%}" if row["best"] is not None else "-"
        best_step = f"{row['best_step']:,}" if row["best_step"] is not None else "-"
        started = moment(row["started"])
        age = short_duration(row["age_seconds"])
        paused = row["paused"] if row["state"] == "running" else None
        state = "paused" if paused else row["state"]
        name = escape(printable(row["name"]))
        lines.append(
            f"{name:<24}{state:<10}{progress:>14}  {best:>7}  {best_step:>7}  {started:<16}  {age}"
        )
        why = paused or row["reason"]
        lines += [f"{'':<24}{escape(printable(why))}"] if why else []
    unfinished = [
        row["name"]
        for row in rows
        if row["steps"] and row["state"] in ("died", "stopped", "failed")
    ]
    ending = (
        [f"Next: {escape(typed(Run(RUNS / unfinished[-1]).resume_command()))}"]
        if unfinished
        else []
    )
    emit(
        {"runs": rows},
        [*lines, *ending] if rows else ["No runs here yet.", f"Next: {typed('train')}"],
        common,
    )
    return 0


def run_row(run: Run) -> dict[str, Any]:
    """A run as `lapclip runs` shows it."""
    from lapclip.runs.follow import RunStatus

    status = RunStatus(run)
    status.refresh()
    row = status.row()
    return {**row, "age_seconds": time.time() - row["started"] if row["started"] else None}

"""`lapclip doctor`."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.markup import escape

from lapclip.cli.output import Common, emit, typed, typed_in
from lapclip.text import printable

if TYPE_CHECKING:
    from lapclip.runs.findings import Finding

MARKS = {
    "alarm": "[red]alarm[/red]  ",
    "warning": "[yellow]warning[/yellow]",
    "note": "[blue]note[/blue]   ",
}
INDENT = " " * 9


def doctor(
    run: str | None = None,
    /,
    *,
    common: Common | None = None,
) -> int:
    """Say in plain words what is wrong with a run, with the evidence and a next step.

    Works from the run's events, while it is going on and after it. docs/doctor.md lists what is looked for.

    For example:

    - `lapclip doctor`
    - `lapclip doctor first-run-2`
    - `lapclip doctor first-run-2 --json`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    """
    from lapclip.runs.findings import findings, surroundings_of
    from lapclip.runs.folder import find_run
    from lapclip.runs.follow import FollowedRun

    named_run = find_run(run)
    followed = FollowedRun(named_run)
    followed.refresh()
    summary, around = followed.summary, surroundings_of(named_run)
    found = findings(summary, around)
    next_command = around.command("report" if found or around.state != "finished" else "eval")
    if around.state in ("died", "stopped"):
        next_command = around.resume()
    if not summary.started and around.state == "starting":  # there is nothing to report on
        next_command = around.command("watch")
    if not summary.started and around.state == "failed":
        next_command = "runs"
    where = f"{around.state}, step {summary.step:,} of {summary.total_steps:,}"
    lines = [
        f"[bold]{escape(printable(named_run.path))}[/bold], {where}",
        "",
        *_findings_text(found),
        "",
        f"Next: {escape(typed(next_command))}",
    ]
    result = {"run": str(named_run.path), "findings": [asdict(finding) for finding in found]}
    emit(result, lines, common)
    return 0


def _findings_text(findings: list[Finding]) -> list[str]:
    """The findings in full, or that there are none."""
    lines = [] if findings else ["Nothing found."]
    for finding in findings:
        lines.append(
            f"{MARKS[finding.severity]}  [bold]{escape(finding.title)}[/bold]  [dim]{finding.id}[/dim]"
        )
        lines += [escape(line) for line in _wrapped(finding.evidence, INDENT)]
        first, *more = typed_in(
            finding.next
        ).splitlines()  # each on one line, so that a command can be copied
        lines += [
            f"{INDENT}Do: {escape(first)}",
            *(f"{INDENT}    {escape(step)}" for step in more),
            "",
        ]
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(
            part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    ]

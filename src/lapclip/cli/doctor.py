"""`lapclip doctor`."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed, typed_in
from lapclip.text import counted, printable

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
    every: Annotated[bool, Parameter(name="--all", negative="")] = False,
    common: Common | None = None,
) -> int:
    """Say in plain words what is wrong with a run, with the evidence and a next step. With no run, check the machine.

    Works from the run's events, while it is going on and after it. docs/doctor.md lists what is looked for.

    For example:

    - `lapclip doctor`
    - `lapclip doctor first-run-2 --all`
    - `lapclip doctor first-run-2 --json`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    every
        List all that was looked for, and what could not be looked at. Example: lapclip doctor --all
    """
    from lapclip.runs.folder import all_runs

    if run is None and not all_runs():
        result, lines = _machine(every=every)
    else:
        result, lines = _run(run, every=every)
    emit(result, lines, common)
    return 0


def _run(name: str | None, *, every: bool) -> tuple[dict[str, Any], list[str]]:
    from lapclip.runs.findings import CHECKS, examine, surroundings_of
    from lapclip.runs.folder import find_run
    from lapclip.runs.follow import FollowedRun

    run = find_run(name)
    followed = FollowedRun(run)
    followed.refresh()
    summary, around = followed.summary, surroundings_of(run)
    done = examine(summary, around)
    rest = [check.id for check in CHECKS if check.id not in done.checked]
    where = f"{around.state}, step {summary.step:,} of {summary.total_steps:,}"
    lines = [
        f"[bold]{escape(printable(run.path))}[/bold], {where}",
        "",
        *_findings_text(done.findings),
    ]
    lines += _checked_lines(
        done.checked, "Not checked, because it is too early or was not recorded", rest, every=every
    )
    next_command = around.command(
        "report" if done.findings or around.state != "finished" else "eval"
    )
    if around.state in ("died", "stopped"):
        next_command = around.resume()
    if not summary.started and around.state in (
        "starting",
        "failed",
    ):  # there is nothing to report on
        next_command = around.command("watch") if around.state == "starting" else "runs"
    result = {**_result(str(run.path), done.findings, done.checked), "not_checked": rest}
    return result, [*lines, "", f"Next: {escape(typed(next_command))}"]


def _machine(*, every: bool) -> tuple[dict[str, Any], list[str]]:
    """With no run to look at, the machine's check list in the same form."""
    from lapclip.machine.overview import overview
    from lapclip.runs.findings.run_state import computer_findings

    with Console(stderr=True).status("looking at the machine") as status:
        checks = overview(status.update)["checks"]
    found, checked = computer_findings(checks)
    lines = [
        "[bold]No runs here yet, so this is about the machine.[/bold]",
        "",
        *_findings_text(found),
    ]
    unknown = [check["name"] for check in checks if check["ok"] is None]
    lines += _checked_lines(checked, "Not known here", unknown, every=every)
    return {**_result(None, found, checked), "not_checked": unknown}, [
        *lines,
        "",
        f"Next: {typed('machine')}, or {typed('train')}",
    ]


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


def _checked_lines(checked: list[str], why_not: str, rest: list[str], *, every: bool) -> list[str]:
    """How much was checked; with `every`, what."""
    if every:
        return [*_listed("Looked for", checked), *_listed(why_not, rest)]
    others = f"; {len(rest)} more could not be" if rest else ""
    return [f"[dim]{counted(len(checked), 'thing')} looked for{others} (--all lists them)[/dim]"]


def _listed(head: str, ids: list[str]) -> list[str]:
    return [escape(line) for line in _wrapped(f"{head}: {', '.join(ids)}.", "")] if ids else []


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(
            part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    ]


def _result(run: str | None, findings: list[Finding], checked: list[str]) -> dict[str, Any]:
    return {"run": run, "findings": [asdict(finding) for finding in findings], "checked": checked}

"""`lapclip doctor`."""

from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed
from lapclip.text import printable

if TYPE_CHECKING:
    from lapclip.runs.findings import Finding

MARKS = {"alarm": "[red]alarm[/red]  ", "warning": "[yellow]warning[/yellow]", "note": "[blue]note[/blue]   "}
INDENT = " " * 9


def doctor(run: str | None = None, /, *, common: Common | None = None) -> int:
    """Say in plain words what is wrong with a run, with the evidence and a next step. With no run, check the machine.

    Works from the run's events, while it is going on and after it. docs/doctor.md lists what is looked for.

    For example:

    - `lapclip doctor`
    - `lapclip doctor first-run-2 --json`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    """
    from lapclip.runs.folder import all_runs

    if run is None and not all_runs():
        result, lines = _machine()
    else:
        result, lines = _run(run)
    emit(result, lines, common)
    return 0


def _run(name: str | None) -> tuple[dict[str, Any], list[str]]:
    from lapclip.runs.findings import CHECKS, examine, look_around
    from lapclip.runs.folder import find_run
    from lapclip.runs.follow import FollowedRun

    run = find_run(name)
    followed = FollowedRun(run)
    followed.refresh()
    summary, around = followed.summary, look_around(run)
    done = examine(summary, around)
    rest = [check.id for check in CHECKS if check.id not in done.checked]
    where = f"{around.state}, step {summary.step:,} of {summary.total_steps:,}"
    if followed.waits_for:
        where = f"waiting for {escape(printable(followed.waits_for))} to end"
    lines = [f"[bold]{escape(printable(run.path))}[/bold], {where}", "", *_findings_text(done.findings, done.checked)]
    lines += _listed("Not checked, because it is too early or was not recorded", rest)
    next_command = f"report {run.name}" if done.findings or around.state != "finished" else f"eval {run.name}"
    if around.state in ("died", "stopped"):
        next_command = f"resume {run.name}"
    if not summary.started and around.state in ("starting", "failed"):  # there is nothing to report on
        next_command = f"watch {run.name}" if around.state == "starting" else "runs"
    return _result(str(run.path), done.findings, done.checked), [*lines, "", f"Next: {typed(next_command)}"]


def _machine() -> tuple[dict[str, Any], list[str]]:
    """With no run to look at, the machine's check list in the same form."""
    from lapclip.machine.overview import overview
    from lapclip.runs.findings.run_state import computer_findings

    with Console(stderr=True).status("looking at the machine") as status:
        checks = overview(status.update)["checks"]
    found, checked = computer_findings(checks)
    lines = ["[bold]No runs here yet, so this is about the machine.[/bold]", "", *_findings_text(found, checked)]
    unknown = [check["name"] for check in checks if check["ok"] is None]
    lines += _listed("Not known here", unknown)
    return _result(None, found, checked), [*lines, "", f"Next: {typed('machine')}, or {typed('train')}"]


def _findings_text(findings: list[Finding], checked: list[str]) -> list[str]:
    """The findings in full, or that there are none, with what was looked for."""
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.severity]}  [bold]{escape(finding.title)}[/bold]  [dim]{finding.id}[/dim]")
        lines += [escape(line) for line in _wrapped(finding.evidence, INDENT)]
        step = re.sub(r"\blapclip (?=[a-z])", lambda _: typed(""), finding.next)
        lines += [f"{INDENT}Do: {escape(step)}", ""]  # on one line, so that a command can be copied
    head = "Looked for" if findings else "Nothing found. Looked for"
    return [*lines, *_listed(head, checked)]


def _listed(head: str, ids: list[str]) -> list[str]:
    return [escape(line) for line in _wrapped(f"{head}: {', '.join(ids)}.", "")] if ids else []


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    ]


def _result(run: str | None, findings: list[Finding], checked: list[str]) -> dict[str, Any]:
    return {"run": run, "findings": [asdict(finding) for finding in findings], "checked": checked}

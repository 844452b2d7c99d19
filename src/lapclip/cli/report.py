"""`lapclip report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, confirmed, emit, typed
from lapclip.results import check_writable, to_text, write_result
from lapclip.suggest import command
from lapclip.text import printable


def report(
    run: str | None = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    share: Annotated[Path | None, Parameter(show_default=False)] = None,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Write a run as one HTML page with its plots, and the same as Markdown. Works while the run is going on, too.

    The page needs no network and no other file: send it, print it, read it on a phone. A comparison saved by
    `lapclip compare` is shown with it, or alone where there is no run.

    For example:

    - `lapclip report`
    - `lapclip report first-run-2 --out shared`
    - `lapclip report first-run --share mine.json`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    out
        Folder for the files; without one, the run's own. Example: lapclip report --out shared
    share
        Also write what the run measured on which machine as a small JSON file for others (`lapclip results`): no paths,
        no names, no captions. All of it is shown before it is written. Example: lapclip report --share mine.json
    yes
        Do not ask before that file is written. Example: lapclip report --share mine.json --yes
    """
    from lapclip.report import write_report

    console = Console(stderr=True, highlight=False)
    shared = share and _shared(run, share, yes, common)
    with console.status("reading the run and drawing it"):
        files, warnings = write_report(run, out)
    for warning in warnings:
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    next_line = f"Next: open {files[0]} in a browser, or {typed('runs')}"
    if share and shared:
        write_result(share, shared)
        files.append(share)
        next_line = f"Next: {typed(command('results', share))}; docs/results.md says where to send {share}"
    names = [str(path) for path in files]
    emit({"files": names}, [*map(escape, names), escape(next_line)], common)
    return 0


def _shared(run: str | None, path: Path, yes: bool, common: Common | None) -> dict[str, Any] | None:
    """What of a run is to be written for others, shown to whoever is asked; None where they would rather not."""
    from lapclip.commands.share_run import share_run

    check_writable(path)
    content = share_run(run)
    print(f"{printable(path)} will hold this and nothing else:", file=sys.stderr)
    print(to_text(content), end="", file=sys.stderr, flush=True)
    refusal = f"{path} was not written: nobody can be asked."
    return content if yes or confirmed(f"Write {escape(printable(path))}?", refusal, common) else None

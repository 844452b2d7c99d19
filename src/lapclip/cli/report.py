"""`lapclip report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed


def report(
    run: str | None = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    common: Common | None = None,
) -> int:
    """Write a run as one HTML page with its plots, and the same as Markdown. Works while the run is going on, too.

    The page needs no network and no other file: send it, print it, read it on a phone. A comparison saved by
    `lapclip compare` is shown with it, or alone where there is no run.

    For example:

    - `lapclip report`
    - `lapclip report first-run-2 --out shared`

    Parameters
    ----------
    run
        The run's name; without one, the newest with a model.
    out
        Folder for the files; without one, the run's own. Example: lapclip report --out shared
    """
    from lapclip.report import write_report

    console = Console(stderr=True, highlight=False)
    with console.status("reading the run and drawing it"):
        files, warnings = write_report(run, out)
    for warning in warnings:
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    next_line = f"Next: open {files[0]} in a browser, or {typed('runs')}"
    names = [str(path) for path in files]
    emit({"files": names}, [*map(escape, names), escape(next_line)], common)
    return 0

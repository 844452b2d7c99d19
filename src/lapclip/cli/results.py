"""`lapclip results`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lapclip.cli.output import Common, emit, typed
from lapclip.errors import ConfigError
from lapclip.text import printable

COLUMNS = 6
"""Of a table that a terminal has room for; the page has all."""


def results(
    *files: Path,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    common: Common | None = None,
) -> int:
    """Put results that people shared on one page: how soon runs reach a recall, step times, comparisons of devices.

    Takes what `lapclip report --share`, `lapclip compare --share` and `benchmarks/steps.py --share` wrote. A file that
    was edited or damaged is refused; one that is there twice counts once.

    For example:

    - `lapclip results results/`
    - `lapclip results mine.json theirs.json --out shared`

    Parameters
    ----------
    files
        Files, or folders whose JSON files are taken.
    out
        Folder for lapclip-results.html and lapclip-results.md; without one, this folder. Example: lapclip results
        results/ --out shared
    """
    from lapclip.commands.results import read_results, write_results
    from lapclip.report.results_report import result_tables

    if not files:
        raise ConfigError("No file of results is named.", hint="lapclip results mine.json theirs.json")
    console = Console(stderr=True, highlight=False)
    with console.status("reading the results and drawing them"):
        found = read_results(files)
        written = [str(path) for path in write_results(found, out)]
    for path, first in found.duplicates:
        again = f"{printable(path)} holds the same as {printable(first)} and counts once."
        console.print(again, style="yellow", markup=False, soft_wrap=True)
    tables: list[str | Table] = []
    for title, table in result_tables(found.results):
        rows = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in table.columns[:COLUMNS]:
            rows.add_column(escape(column), header_style="dim", overflow="fold")
        for row in table.rows:
            rows.add_row(*(escape(printable(cell)) for cell in row[:COLUMNS]))
        tables += [rows, ""]
    next_line = f"Next: open {escape(written[0])} in a browser, or {typed('report --share mine.json')}"
    emit({"files": written, **found.to_dict()}, [*tables, *map(escape, written), next_line], common)
    return 0

"""`lapclip compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.output import Common, emit, typed
from lapclip.cli.progress import display
from lapclip.errors import ConfigError


def compare(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seconds: float | None = None,
    share: Path | None = None,
    others: Annotated[tuple[Path, ...], Parameter(name="--with", negative="", show_default=False)] = (),
    common: Common | None = None,
) -> int:
    """Compare the CPU with every accelerator here, over sizes of model and batch, by whole training steps.

    With one device only, its precisions and thread counts are compared. Ends with the crossover, what larger models
    would take, a recommendation for each size, and a look inside a step.

    For example:

    - `lapclip compare --quick`
    - `lapclip compare --share mine.json`
    - `lapclip compare --quick --with theirs.json`

    Parameters
    ----------
    quick
        End within 90 seconds: fewer cells, no look inside a step. Example: lapclip compare --quick
    seconds
        Time for the cells; 600 by default. Example: lapclip compare --seconds 120
    share
        Also write the result as a JSON file without personal data. Example: lapclip compare --share mine.json
    others
        Put other machines' files beside this one; may be repeated. Example: lapclip compare --with theirs.json
    """
    from lapclip import trials
    from lapclip.tune.microscope import lines as inside

    with display() as shown:
        found = trials.compare(quick=quick, seconds=seconds, others=others, tell=shown.tuning_progress)
    if share is not None:
        try:
            share.write_text(json.dumps({key: found[key] for key in found if key != "others"}, indent=1))
        except OSError as error:
            raise ConfigError(f"{share} cannot be written: {error.strerror}.", hint="--share another.json") from None
    emit(found, summary(found, inside), common)
    return 0


def summary(found: dict[str, Any], inside: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    """Tables for people."""
    lines = [f"[bold]{escape(found['machine']['chip'])}[/bold], torch {found['torch']}", "", "ms a step"]
    lines += cell_table(found["cells"])
    lines += ["", f"[bold]{found['crossover']['text']}[/bold]", ""]
    for one in found["fits"]:
        rate = one["flops_per_second"] / 1e9
        parts = (
            f"{one['overhead_ms']:.1f} ms + {one['ns_per_parameter']:.2f} ns a parameter + work at {rate:,.0f} GFLOP/s"
        )
        lines.append(f"{_name(one):<24}{parts}; off by {one['error']:.0%} on cells it did not see")
    if found["predictions"]:
        lines += ["", "predicted by these fits, not measured"]
    for one in found["predictions"]:
        size = f"{one['parameters'] / 1e6:>6,.0f} M, batch {one['batch']:<4}"
        lines.append(f"  {size} {_name(one):<24}{one['ms'] / 1e3:>9.2f} s a step")
    lines += ["", "most pairs a second"]
    lines += [f"  {one['parameters'] / 1e6:>6.3g} M  {one['text']}" for one in found["recommendations"]]
    for other in found.get("others", []):
        lines += ["", f"[bold]{escape(str(other['machine']['chip']))}[/bold], torch {other.get('torch', 'unknown')}"]
        lines += [f"  {one['parameters'] / 1e6:>6.3g} M  {one['text']}" for one in other["recommendations"]]
        lines.append(f"  {other['crossover']['text']}")
    for kind, looked in found.get("microscope", {}).items():
        lines += ["", f"[bold]inside a step, {kind}[/bold]", *inside(looked)]
    return [*lines, f"Next: {typed('report')}, or {typed('compare --share mine.json')}"]


def cell_table(cells: list[dict[str, Any]]) -> list[str]:
    """One row a size and contestant, one column a batch. Sizes of which nothing was run are left to the predictions."""
    run = {cell["parameters"] for cell in cells if cell["ms"] is not None}
    cells = [cell for cell in cells if cell["parameters"] in run]
    batches = sorted({cell["batch"] for cell in cells})
    rows: dict[tuple[int, str], dict[int, str]] = {}
    for cell in cells:
        shown = f"{cell['ms']:,.1f}" if cell["ms"] is not None else "-"
        rows.setdefault((cell["parameters"], _name(cell)), {})[cell["batch"]] = shown
    head = f"[dim]{'parameters':<11}{'':<24}" + "".join(f"{f'batch {batch}':>11}" for batch in batches) + "[/dim]"
    return [
        head,
        *(
            f"{parameters / 1e6:>7.3g} M  {name:<24}" + "".join(f"{row.get(batch, ''):>11}" for batch in batches)
            for (parameters, name), row in rows.items()
        ),
    ]


def _name(entry: dict[str, Any]) -> str:
    threads = f", {entry['threads']} thread{'s' * (entry['threads'] != 1)}" if entry["device"] == "cpu" else ""
    return f"{entry['device']} {entry['dtype']}{threads}"

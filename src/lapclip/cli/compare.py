"""`lapclip compare`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.join import check_machines, quiet_torch, say
from lapclip.cli.output import Common, emit, typed
from lapclip.text import counted

NAME_WIDTH = 26  # of a contestant


def compare(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seconds: float | None = None,
    machines: int | None = None,
    common: Common | None = None,
) -> int:
    """Compare the CPU with every accelerator here, over sizes of model and batch, by whole training steps.

    With one device only, its precisions and thread counts are compared. Ends with the crossover and the fastest for each
    size. The report has the curves, what larger models would take, and the phases of a step.

    For example:

    - `lapclip compare --quick`
    - `lapclip compare --machines 2`

    Parameters
    ----------
    quick
        End within 90 seconds: fewer cells, and not the phases of a step. Example: lapclip compare --quick
    seconds
        Time for the cells; 600 by default. Example: lapclip compare --seconds 120
    machines
        Train the model of recipe seed for a few steps, alone and with so many computers, this one among them; the line
        to type on the others is shown. Example: lapclip compare --machines 2
    """
    check_machines(machines, background=False)
    if machines is not None:
        return _compare_machines(machines, common)
    with loading():
        from lapclip.commands.compare import compare as compare_devices

    with display() as shown:
        found = compare_devices(quick=quick, seconds=seconds, progress=shown.tuning_progress)
    emit(found, summary(found), common)
    return 0


def _compare_machines(machines: int, common: Common | None) -> int:
    quiet_torch()
    from lapclip.commands.compare import compare_machines
    from lapclip.training.request import Callbacks

    with display() as shown:
        callbacks = Callbacks([shown], shown.data_progress, shown.tuning_progress)
        comparison = compare_machines(machines, callbacks, say)
    seconds = comparison["alone_step_seconds"], comparison["together_step_seconds"]
    line = "{:.2f} s a step alone, {:.2f} s together: {:.2f}x as fast".format(
        *seconds, comparison["speedup"]
    )
    emit(comparison, [line], common)
    return 0


def summary(found: dict[str, Any]) -> list[str]:
    """Return the times, the crossover and the fastest of each size."""
    names = " and ".join(dict.fromkeys([found["machine"]["chip"], *found["devices"].values()]))
    lines = [f"[bold]{escape(names)}[/bold], torch {found['torch']}", "", "ms a step"]
    lines += cell_table(found["cells"])
    lines += [f"[yellow]{escape(warning)}[/yellow]" for warning in found["warnings"]]
    lines += ["", f"[bold]{found['crossover']['text']}[/bold]", "", "fastest, by size"]
    for row in found["recommendations"]:
        lines.append(f"  {row['parameters'] / 1e6:>6.3g} M  {row['text']}")
    lines += ["", "time of a step"]
    for fit in found["fits"]:
        lines.append(
            f"{name_contestant(fit):<{NAME_WIDTH}}{fit['overhead_ms']:.1f} ms"
            f" + {fit['ms_per_layer']:.2f} ms a layer + {fit['ns_per_parameter']:.2f} ns a parameter"
            f" + work at {fit['flops_per_second'] / 1e9:,.0f} GFLOP/s;"
            f" off by {fit['error']:.0%} on cells it did not see"
        )
    return [*lines, f"Next: {typed('report')}, with predictions and phases"]


def cell_table(cells: list[dict[str, Any]]) -> list[str]:
    """Return a row for each size and contestant, with a column for each batch.

    Sizes of which nothing was run are left out.
    """
    run_sizes = {cell["parameters"] for cell in cells if cell["ms"] is not None}
    cells = [cell for cell in cells if cell["parameters"] in run_sizes]
    batches = sorted({cell["batch"] for cell in cells})
    rows: dict[tuple[int, str], dict[int, str]] = {}
    for cell in cells:
        shown = "-" if cell["ms"] is None else f"{cell['ms']:,.1f}"
        rows.setdefault((cell["parameters"], name_contestant(cell)), {})[cell["batch"]] = shown
    header = "".join(f"{f'batch {batch}':>11}" for batch in batches)
    lines = [f"[dim]{'parameters':<11}{'':<{NAME_WIDTH}}{header}[/dim]"]
    for (parameters, name), row in rows.items():
        times = "".join(f"{row.get(batch, ''):>11}" for batch in batches)
        lines.append(f"{parameters / 1e6:>7.3g} M  {name:<{NAME_WIDTH}}{times}")
    if any(cell["ms"] is None for cell in cells):
        lines.append("[dim]- was not run: too long, or too large; lapclip report says which[/dim]")
    return lines


def name_contestant(cell: dict[str, Any]) -> str:
    if cell["device"] != "cpu":
        return f"{cell['device']} {cell['dtype']}"
    return f"cpu {cell['dtype']}, {counted(cell['threads'], 'thread')}"

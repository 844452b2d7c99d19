"""`lapclip compare`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.join import TogetherDisplay, check_machines, own_arguments
from lapclip.cli.output import Common, emit, typed
from lapclip.text import counted

NAME_WIDTH = 26  # of a contestant


def compare(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seconds: float | None = None,
    machines: int | None = None,
    address: str | None = None,
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
        Find out how much faster so many computers are together, this one among them; the line to type on the others is
        shown. Example: lapclip compare --machines 2
    address
        The address or the interface of this computer at which others join, with or without a port. Example: lapclip
        compare --machines 2 --address eth0:29500
    """
    from lapclip.machine.torchrun import under_torchrun

    check_machines(machines, address, background=False)
    if machines is not None:
        return _invite(machines, address)
    if under_torchrun():
        return _compare_machines(common)
    with loading():
        from lapclip.commands.compare import compare as compare_devices

    with display() as shown:
        found = compare_devices(quick=quick, seconds=seconds, progress=shown.tuning_progress)
    emit(found, summary(found), common)
    return 0


def _invite(machines: int, address: str | None) -> int:
    from lapclip.commands.join import host, offer_comparison

    with display() as shown:
        offer = offer_comparison(machines, shown.data_progress)
    return host(offer, machines, address, own_arguments(), None, TogetherDisplay())


def _compare_machines(common: Common | None) -> int:
    from lapclip.commands.compare import compare_machines

    with display() as shown:
        found = compare_machines(shown.tuning_progress)
    if found is not None:
        emit(found, machines_summary(found), common)
    return 0


def machines_summary(found: dict[str, Any]) -> list[str]:
    """What several machines make of training steps, for people."""
    cells = found["cells"]
    if not cells:
        return ["No size fits into memory and time on these machines."]
    lines = [
        f"[bold]{escape(' and '.join(found['machines']))}[/bold]",
        f"[dim]{'parameters':<11}{'batch':>6}{'alone':>10}{'together':>10}{'speed':>8}[/dim]",
    ]
    for cell in cells:
        alone, together = cell["alone_step_seconds"], cell["step_seconds"]
        size = f"{cell['parameters'] / 1e6:>7.3g} M  {cell['batch']:>6}"
        times = f"{alone * 1e3:>7,.0f} ms{together * 1e3:>7,.0f} ms"
        lines.append(f"{size}{times}{alone / together:>7.2f}x")
    return lines


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

"""`lapclip compare`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.join import TogetherDisplay, check_machines, own_arguments
from lapclip.cli.output import Common, emit, typed

NAME = 26
"""Width of a contestant's name."""


def compare(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seconds: float | None = None,
    machines: int | None = None,
    address: str | None = None,
    common: Common | None = None,
) -> int:
    """Compare the CPU with every accelerator here, over sizes of model and batch, by whole training steps.

    With one device only, its precisions and thread counts are compared. Ends with the crossover, what larger models
    would take, a recommendation for each size, and the phases of a step.

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
    from lapclip.machine.ranks import under_torchrun

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
    link = cells[-1]
    lines = [
        f"[bold]{escape(' and '.join(found['machines']))}[/bold]: {link['latency'] * 1e3:.2f} ms there and back, "
        f"{link['bytes_per_second'] * 8 / 1e9:.2f} Gbit/s of gradients",
        f"[dim]{'parameters':<11}{'batch':>6}{'alone':>10}{'predicted':>11}{'measured':>10}{'speed':>8}   shards[/dim]",
    ]
    for cell in cells:
        seconds = (
            cell[name] for name in ("alone_step_seconds", "predicted_step_seconds", "step_seconds")
        )
        alone, predicted, measured = (f"{each * 1e3:,.0f} ms" for each in seconds)
        speed = f"{cell['alone_step_seconds'] / cell['step_seconds']:.2f}x"
        shards = " + ".join(map(str, cell["shards"]))
        size = f"{cell['parameters'] / 1e6:>7.3g} M  {cell['batch']:>6}"
        lines.append(
            f"{size}{alone:>10}{predicted:>11}{measured:>10}{speed:>8}   {shards}; {cell['advice']}"
        )
    return lines


def summary(found: dict[str, Any]) -> list[str]:
    """Tables for people."""
    names = " and ".join(dict.fromkeys([found["machine"]["chip"], *found["devices"].values()]))
    lines = [f"[bold]{escape(names)}[/bold], torch {found['torch']}", "", "ms a step"]
    lines += cell_table(found["cells"])
    lines += [f"[yellow]{escape(warning)}[/yellow]" for warning in found["warnings"]]
    lines += ["", f"[bold]{found['crossover']['text']}[/bold]", ""]
    for one in found["fits"]:
        parts = [
            f"{one['overhead_ms']:.1f} ms",
            f"{one['ms_per_layer']:.2f} ms a layer",
            f"{one['ns_per_parameter']:.2f} ns a parameter",
            f"work at {one['flops_per_second'] / 1e9:,.0f} GFLOP/s",
        ]
        shown = " + ".join(
            part for part in parts if not part.startswith(("0.0 ms", "0.00", "work at 0 "))
        )
        lines.append(
            f"{_name(one):<{NAME}}{shown}; off by {one['error']:.0%} on cells it did not see"
        )
    lines += prediction_table(found["predictions"])
    lines += ["", "what to use, by size"]
    lines += [
        f"  {one['parameters'] / 1e6:>6.3g} M  {one['text']}" for one in found["recommendations"]
    ]
    lines += phases_table(found.get("phases", {}))
    return [*lines, f"Next: {typed('report')}"]


def phases_table(phases_of: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each device: how long a step of a small model takes, and its phases."""
    if not phases_of:
        return []
    lines = ["", "a step of mini at batch 32, by phases"]
    for device, seconds in phases_of.items():
        total = sum(seconds.values())
        shares = ", ".join(f"{phase} {spent / total:.0%}" for phase, spent in seconds.items())
        lines.append(f"{device:<{NAME}}{total * 1e3:,.1f} ms: {shares}")
    return lines


def cell_table(cells: list[dict[str, Any]]) -> list[str]:
    """One row a size and contestant, one column a batch. Sizes of which nothing was run are left to the predictions."""
    run = {cell["parameters"] for cell in cells if cell["ms"] is not None}
    cells = [cell for cell in cells if cell["parameters"] in run]
    batches = sorted({cell["batch"] for cell in cells})
    rows: dict[tuple[int, str], dict[int, str]] = {}
    for cell in cells:
        shown = f"{cell['ms']:,.1f}" if cell["ms"] is not None else "-"
        rows.setdefault((cell["parameters"], _name(cell)), {})[cell["batch"]] = shown
    head = (
        f"[dim]{'parameters':<11}{'':<{NAME}}"
        + "".join(f"{f'batch {batch}':>11}" for batch in batches)
        + "[/dim]"
    )
    left_out = any(cell["ms"] is None for cell in cells)
    return [
        head,
        *(
            f"{parameters / 1e6:>7.3g} M  {name:<{NAME}}"
            + "".join(f"{row.get(batch, ''):>11}" for batch in batches)
            for (parameters, name), row in rows.items()
        ),
        *(
            [
                "[dim]- was not run: too long for this comparison, or too large; --json says which[/dim]"
            ]
            * left_out
        ),
    ]


def prediction_table(said: list[dict[str, Any]]) -> list[str]:
    """One row a contestant, one column a size, at the largest batch that was predicted."""
    if not said:
        return []
    batch = max(one["batch"] for one in said)
    said = [one for one in said if one["batch"] == batch]
    sizes = sorted({one["parameters"] for one in said})
    rows: dict[str, dict[int, str]] = {}
    for one in said:
        rows.setdefault(_name(one), {})[one["parameters"]] = f"{one['ms'] / 1e3:,.2f}"
    columns = "".join(f"{f'{size / 1e6:,.0f} M':>11}" for size in sizes)
    return [
        "",
        f"seconds a step at batch {batch}, predicted by these fits, not measured",
        f"[dim]{'':<{NAME}}{columns}[/dim]",
        *(
            f"{name:<{NAME}}" + "".join(f"{row.get(size, ''):>11}" for size in sizes)
            for name, row in rows.items()
        ),
    ]


def _name(entry: dict[str, Any]) -> str:
    threads = entry["threads"] if entry["device"] == "cpu" else 0
    return f"{entry['device']} {entry['dtype']}" + (
        f", {threads} thread{'s' * (threads != 1)}" if threads else ""
    )

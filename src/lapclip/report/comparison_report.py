"""The comparison of devices, precisions and sizes that `lapclip compare` saves, as sections of a report.

Read with care: what is missing or odd is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lapclip.paths import cache_folder, read_json
from lapclip.report.document import Block, Cell, Plot, Report, Section, Sentences, Table
from lapclip.report.plots import COLOURS, axes, line
from lapclip.report.run_report import machine_rows
from lapclip.runs.curves import Curve
from lapclip.runs.events import mapping, mappings
from lapclip.text import (
    UNKNOWN,
    count,
    milliseconds,
    number,
    parameters,
    significant,
    size,
    times,
)

COMPARISON = "compare.json"
"""File in the cache folder where `lapclip compare` saves its result."""


@dataclass(frozen=True)
class TimedCell:
    """A cell of the comparison that has a time."""

    contestant: str
    """A device or, if there is only one, a precision."""
    device: str
    dtype: str
    parameters: float
    batch: float
    ms: float


def read_comparison() -> tuple[dict[str, Any] | None, str | None]:
    """The saved comparison, if there is one, and a warning if it cannot be read."""
    path = cache_folder() / COMPARISON
    try:
        saved = read_json(path)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{path} is not readable and is left out: {error}."
    if not isinstance(saved, dict) or not mappings(saved.get("cells")):
        return None, f"{path} holds no comparison and is left out. A new one: lapclip compare"
    return saved, None


def timed_cells(saved: dict[str, Any]) -> list[TimedCell]:
    """Return the cells that ran. Devices compete or, if there is only one, its precisions."""
    raw = [cell for cell in mappings(saved.get("cells")) if not cell.get("skipped")]
    has_one_device = len({str(cell.get("device")) for cell in raw}) == 1
    found = []
    for cell in raw:
        size, batch, ms = (number(cell.get(name)) or 0 for name in ("parameters", "batch", "ms"))
        if min(size, batch, ms) <= 0:
            continue
        device, dtype = str(cell.get("device")), str(cell.get("dtype"))
        contestant = dtype if has_one_device else device
        found.append(TimedCell(contestant, device, dtype, size, batch, ms))
    return found


def comparison_report(saved: dict[str, Any]) -> Report:
    """A comparison on its own."""
    machine = mapping(saved.get("machine"))
    about = [
        Table(
            ["", ""],
            [
                [*row]
                for row in [*machine_rows(machine), ["torch", str(saved.get("torch", UNKNOWN))]]
            ],
        )
    ]
    others = [name for kind, name in mapping(saved.get("devices")).items() if kind != "cpu"]
    chip = f"{machine.get('chip', 'unknown chip')}, {count(machine.get('cores'))} cores"
    subtitle = " and ".join([chip, *map(str, others)])
    sections = [*comparison_sections(saved), Section("Machine and versions", [*about])]
    return Report("What is fastest on this machine", subtitle, [], sections)


def comparison_sections(saved: dict[str, Any]) -> list[Section]:
    """Return the crossover, the curves, the advice, every cell, and the phases of a step."""
    cells = timed_cells(saved)
    crossover = mapping(saved.get("crossover")).get("text")
    advice: list[list[str | Cell]] = [
        [
            parameters(r.get("parameters")),
            count(r.get("batch")),
            *(str(r.get(n, "")) for n in ("device", "dtype", "text")),
        ]
        for r in mappings(saved.get("recommendations"))
    ]
    blocks: list[Block] = []
    if crossover:
        blocks.append(Sentences([str(crossover)]))
    blocks += _map(cells)
    blocks += _curves(saved, cells)
    if advice:
        blocks.append(Sentences(["What to use, by model and batch:"]))
        blocks.append(Table(["model", "batch", "device", "precision", "why"], advice))
    blocks += _all_cells(saved)
    fastest = [Section("What is fastest here", blocks)] if blocks else []
    return [*fastest, *_phases_section(saved)]


def _phases_section(saved: dict[str, Any]) -> list[Section]:
    """Return a table of the milliseconds of each phase of a step, by device."""
    rows: list[list[str | Cell]] = []
    phases: list[str] = []
    for device, measured in mapping(saved.get("phases")).items():
        milliseconds = {}
        for phase, seconds in mapping(measured).items():
            if (value := number(seconds)) is not None:
                milliseconds[phase] = f"{value * 1e3:,.1f}"
        if milliseconds:
            phases = phases or list(milliseconds)
            rows.append([str(device), *(milliseconds.get(phase, "") for phase in phases)])
    if not rows:
        return []
    return [Section("Milliseconds of a step by phase", [Table(["device", *phases], rows)])]


def _map(cells: list[TimedCell]) -> list[Block]:
    """Return a table of model size against batch size: the fastest, and by how much."""
    rivals = sorted({cell.contestant for cell in cells})
    if len(rivals) < 2:
        return []
    batches = sorted({cell.batch for cell in cells})
    rows: list[list[str | Cell]] = []
    for model in sorted({cell.parameters for cell in cells}):
        row: list[str | Cell] = [parameters(model)]
        for batch in batches:
            best: dict[str, float] = {}
            for cell in cells:
                if (cell.parameters, cell.batch) == (model, batch):
                    best[cell.contestant] = min(cell.ms, best.get(cell.contestant, cell.ms))
            row.append(_winner(best, rivals))
        rows.append(row)
    explanation = (
        "Each cell names the fastest and how many times as fast as the second it is. Where the color changes is the "
        "crossover; a tie means a difference under 5 %."
    )
    return [
        Table(["model / batch", *(count(batch) for batch in batches)], rows),
        Sentences([explanation]),
    ]


def _winner(best: dict[str, float], rivals: list[str]) -> str | Cell:
    """The fastest and its factor over the second."""
    order = sorted(best, key=best.__getitem__)
    if not order:
        return UNKNOWN
    tone = rivals.index(order[0]) % len(COLOURS) + 1
    if len(order) == 1:
        return Cell(f"{order[0]}, alone", tone)
    factor = best[order[1]] / best[order[0]]
    if factor < 1.05:
        return Cell("a tie", 0)
    return Cell(f"{order[0]} {times(factor)}", tone)


def _curves(saved: dict[str, Any], cells: list[TimedCell]) -> list[Block]:
    """Return time against size at the smallest, a middle and the largest batch that have more than one size."""
    sizes_of_batch: dict[float, set[float]] = {}
    for cell in cells:
        sizes_of_batch.setdefault(cell.batch, set()).add(cell.parameters)
    batches = sorted(batch for batch, sizes in sizes_of_batch.items() if len(sizes) > 1)
    shown = sorted({batches[0], batches[len(batches) // 2], batches[-1]}) if batches else []
    return [_curve(saved, cells, batch) for batch in shown]


def _curve(saved: dict[str, Any], cells: list[TimedCell], batch: float) -> Plot:
    """Return a plot of the time of a step against model size: measured, fitted and predicted."""
    traces, curves = [], {}
    for at, contestant in enumerate(sorted({cell.contestant for cell in cells})):
        color = COLOURS[at % len(COLOURS)]
        kinds = {(cell.device, cell.dtype) for cell in cells if cell.contestant == contestant}
        measured = _best_by_size(saved, "cells", "ms", kinds, batch)
        if not measured:
            continue
        dots = {"color": color, "size": 8}
        traces.append(line(contestant, measured, color, unit=" ms", mode="markers", marker=dots))
        curves[f"{contestant}, ms"] = measured
        fitted = _best_by_size(saved, "cells", "fitted_ms", kinds, batch)
        if fitted:
            traces.append(line(f"{contestant}, fit", fitted, color, unit=" ms", showlegend=False))
        predicted = _best_by_size(saved, "predictions", "ms", kinds, batch)
        if predicted:
            name, start = f"{contestant}, predicted", fitted or measured
            joined = Curve([start.x[-1], *predicted.x], [start.y[-1], *predicted.y])
            style = {"color": color, "width": 2, "dash": "dash"}
            circles = {"symbol": "circle-open", "size": 8}
            traces.append(
                line(
                    name,
                    joined,
                    color,
                    unit=" ms",
                    mode="lines+markers",
                    line=style,
                    marker=circles,
                )
            )
            curves[f"{name}, ms"] = predicted
    return Plot(
        f"Time of a step at batch {count(batch)}",
        traces,
        axes("parameters", "ms a step", x_log=True, y_log=True),
        "Dots are measured, lines are the fit, dashed is predicted. A level start is overhead; where lines cross, the "
        "other one becomes the better choice.",
        _by_size(curves),
        height=380,
    )


def _best_by_size(
    saved: dict[str, Any], rows: str, field: str, kinds: set[tuple[str, str]], batch: float
) -> Curve:
    """Return the least time for each model size, of these devices and precisions at this batch size."""
    best: dict[float, float] = {}
    for row in mappings(saved.get(rows)):
        model, ms = number(row.get("parameters")), number(row.get(field))
        is_wanted = (str(row.get("device")), str(row.get("dtype"))) in kinds
        if is_wanted and row.get("batch") == batch and model and ms and model > 0 and ms > 0:
            best[model] = min(ms, best.get(model, ms))
    sizes = sorted(best)
    return Curve(sizes, [best[size] for size in sizes])


def _all_cells(saved: dict[str, Any]) -> list[Block]:
    rows: list[list[Any]] = []
    for cell in mappings(saved.get("cells")):
        note = ""
        if cell.get("skipped"):
            note = f"not run: {cell['skipped']}"
        row = [
            f"{cell.get('model', '')} {parameters(cell.get('parameters'))}".strip(),
            count(cell.get("batch")),
            f"{cell.get('device', UNKNOWN)} {cell.get('dtype', '')}",
            count(cell.get("threads")),
            milliseconds(cell.get("ms")),
            count(cell.get("pairs_per_second")),
            size(cell.get("peak_memory_bytes")),
            note,
        ]
        rows.append(row)
    columns = ["model", "batch", "device", "threads", "step", "pairs/s", "peak memory", ""]
    return [Table(columns, rows, folded="Every cell")] if rows else []


def _by_size(curves: dict[str, Curve]) -> Table:
    """Times by model size, a column for each curve."""
    sizes = sorted({x for points in curves.values() for x in points.x})
    found = {name: dict(zip(points.x, points.y, strict=True)) for name, points in curves.items()}
    return Table(
        ["parameters", *curves],
        [[parameters(x), *(significant(own.get(x)) for own in found.values())] for x in sizes],
    )

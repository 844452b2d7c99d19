"""The comparison of devices, precisions and sizes that `lapclip compare` saves, as sections of a report.

Read with care: what is missing or odd is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
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
    percent,
    significant,
    size,
    times,
)


@dataclass(frozen=True)
class TimedCell:
    """A cell of the comparison that has a time."""

    contestant: str
    """Who wins or loses: a device; where there is one only, a precision, with its threads if they vary."""
    group: str
    """The same without threads: fits and predictions are of the best."""
    device: str
    dtype: str
    parameters: float
    batch: float
    ms: float


def comparison_file() -> Path:
    """Where `lapclip compare` saves its result."""
    return cache_folder() / "compare.json"


def read_comparison() -> tuple[dict[str, Any] | None, str | None]:
    """The saved comparison, if there is one, and a warning if it cannot be read."""
    path = comparison_file()
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
    """The cells that ran. Devices compete; where there is one only, its precisions and thread counts do."""
    raw = [cell for cell in mappings(saved.get("cells")) if not cell.get("skipped")]
    alone = len({str(cell.get("device")) for cell in raw}) == 1
    threads = {str(cell.get("threads")) for cell in raw}
    found = []
    for cell in raw:
        numbers = [number(cell.get(name)) for name in ("parameters", "batch", "ms")]
        if any(value is None or value <= 0 for value in numbers):
            continue
        device, dtype = str(cell.get("device")), str(cell.get("dtype"))
        name = dtype if alone else device
        group = name
        if alone and len(threads) > 1:
            name = f"{dtype}, {count(cell.get('threads'))} thread{'' if cell.get('threads') == 1 else 's'}"
        found.append(
            TimedCell(
                name, group, device, dtype, *(value for value in numbers if value is not None)
            )
        )
    return found


def contestants(cells: list[TimedCell]) -> list[str]:
    """Everyone who competes, in order."""
    return sorted({cell.contestant for cell in cells})


def fastest(cells: list[TimedCell]) -> dict[tuple[float, float], float]:
    """The least time at each model size and batch size."""
    best: dict[tuple[float, float], float] = {}
    for cell in cells:
        sizes = (cell.parameters, cell.batch)
        best[sizes] = min(cell.ms, best.get(sizes, cell.ms))
    return best


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
    sections = [
        *comparison_sections(saved),
        *phases_section(saved),
        Section("Machine and versions", [*about]),
    ]
    return Report("What is fastest on this machine", subtitle, [], sections)


def comparison_sections(saved: dict[str, Any]) -> list[Section]:
    """The crossover, the curves, the advice, and every cell."""
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
    blocks += _predictions(saved)
    blocks += _all_cells(saved)
    return [Section("What is fastest here", blocks)] if blocks else []


def phases_section(saved: dict[str, Any]) -> list[Section]:
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
    """Model size against batch size: who wins, and by how much."""
    rivals = contestants(cells)
    sizes, batches = (
        sorted({cell.parameters for cell in cells}),
        sorted({cell.batch for cell in cells}),
    )
    if len(rivals) < 2:
        return []
    rows: list[list[str | Cell]] = []
    for model in sizes:
        row: list[str | Cell] = [parameters(model)]
        for batch in batches:
            best: dict[str, float] = {}
            for cell in cells:
                if (cell.parameters, cell.batch) == (model, batch):
                    best[cell.contestant] = min(cell.ms, best.get(cell.contestant, cell.ms))
            row.append(_winner(best, rivals))
        rows.append(row)
    explanation = (
        "Each cell names the fastest and how many times as fast as the second it is. Where the colour changes is the "
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
    """Time against size at the smallest, a middle and the largest batch that have more than one size."""
    batches = sorted(
        {c.batch for c in cells if len({d.parameters for d in cells if d.batch == c.batch}) > 1}
    )
    shown = sorted({batches[0], batches[len(batches) // 2], batches[-1]}) if batches else []
    return [_curve(saved, cells, batch) for batch in shown]


def _curve(saved: dict[str, Any], cells: list[TimedCell], batch: float) -> Plot:
    here = [cell for cell in cells if cell.batch == batch]
    traces, curves = [], {}
    for at, group in enumerate(sorted({cell.group for cell in cells})):
        colour = COLOURS[at % len(COLOURS)]
        own = _best_by_size(cell for cell in here if cell.group == group)
        if not own:
            continue
        traces.append(
            line(
                group, own, colour, unit=" ms", mode="markers", marker={"color": colour, "size": 8}
            )
        )
        curves[f"{group}, ms"] = own
        kinds = {(cell.device, cell.dtype) for cell in cells if cell.group == group}
        ahead = Curve(*_columns(_predicted(saved, kinds, batch)))
        fitted = _fitted(saved, kinds, batch)
        if fitted:
            style = {"color": colour, "width": 2}
            traces.append(
                line(f"{group}, fit", fitted, colour, unit=" ms", line=style, showlegend=False)
            )
        if ahead:
            joined = Curve([*(fitted or own).x[-1:], *ahead.x], [*(fitted or own).y[-1:], *ahead.y])
            style = {"color": colour, "width": 2, "dash": "dash"}
            name = f"{group}, predicted"
            marker = {"symbol": "circle-open", "size": 8}
            traces.append(
                line(
                    name,
                    joined,
                    colour,
                    unit=" ms",
                    mode="lines+markers",
                    line=style,
                    marker=marker,
                )
            )
            curves[f"{name}, ms"] = ahead
    return Plot(
        f"Time of a step at batch {count(batch)}",
        traces,
        axes("parameters", "ms a step", x_log=True, y_log=True),
        "Dots are measured, lines are the fit, dashed is predicted. A level start is overhead; where lines cross, the "
        "other one becomes the better choice.",
        _by_size(curves),
        height=380,
    )


def _fitted(saved: dict[str, Any], kinds: set[tuple[str, str]], batch: float) -> Curve:
    """What the fits say at every size of the comparison, run or not: of the fastest precision and threads."""
    best: dict[float, float] = {}
    for cell in mappings(saved.get("cells")):
        model, ms = number(cell.get("parameters")), number(cell.get("fitted_ms"))
        own = (str(cell.get("device")), str(cell.get("dtype"))) in kinds and cell.get(
            "batch"
        ) == batch
        if own and model and ms:
            best[model] = min(ms, best.get(model, ms))
    return Curve(*_columns(sorted(best.items())))


def _predictions(saved: dict[str, Any]) -> list[Block]:
    rows: list[list[Any]] = [
        [
            parameters(p.get("parameters")),
            count(p.get("batch")),
            f"{p.get('device')} {p.get('dtype')}",
            milliseconds(p["ms"]),
        ]
        for p in mappings(saved.get("predictions"))
        if number(p.get("ms")) is not None
    ]
    fits: list[list[Any]] = [
        [f"{f.get('device')} {f.get('dtype')}", milliseconds(f.get("overhead_ms")),
         f"{significant(number(f.get('ms_per_layer')) or 0.0)} ms",
         f"{significant(number(f.get('ns_per_parameter')) or 0.0)} ns",
         f"{significant((number(f.get('flops_per_second')) or 0) / 1e9)} GFLOP/s", percent(f.get("error"))]
        for f in mappings(saved.get("fits"))
    ]  # fmt: skip
    blocks: list[Block] = []
    if fits:
        blocks.append(
            Sentences(
                [
                    "The fit: time = overhead + layers times a layer's time + parameters times an update's time + "
                    "work / rate; its error is that on cells it has not seen."
                ]
            )
        )
        blocks.append(Table(["device", "overhead", "a layer", "an update", "rate", "error"], fits))
    if rows:
        blocks.append(
            Table(
                ["model", "batch", "device", "predicted step"],
                rows,
                folded="Predicted, not measured",
            )
        )
    return blocks


def _all_cells(saved: dict[str, Any]) -> list[Block]:
    rows: list[list[Any]] = []
    for c in mappings(saved.get("cells")):
        measured = [
            milliseconds(c.get("ms")),
            count(c.get("pairs_per_second")),
            size(c.get("peak_memory_bytes")),
        ]
        joules = UNKNOWN if number(c.get("joules")) is None else f"{significant(c['joules'])} J"
        device = f"{c.get('device', UNKNOWN)} {c.get('dtype', '')}"
        name = f"{c.get('model', '')} {parameters(c.get('parameters'))}".strip()
        note = f"not run: {c['skipped']}" if c.get("skipped") else ""
        rows.append(
            [
                name,
                count(c.get("batch")),
                device,
                count(c.get("used_threads")),
                *measured,
                joules,
                note,
            ]
        )
    columns = [
        "model",
        "batch",
        "device",
        "threads",
        "step",
        "pairs/s",
        "peak memory",
        "energy",
        "",
    ]
    return [Table(columns, rows, folded="Every cell")] if rows else []


def _best_by_size(cells: Iterable[TimedCell]) -> Curve:
    best = fastest(list(cells))
    return Curve(*_columns(sorted((sizes[0], ms) for sizes, ms in best.items())))


def _predicted(
    saved: dict[str, Any], kinds: set[tuple[str, str]], batch: float
) -> list[tuple[float, float]]:
    """Predictions of a contestant at a batch size: the fastest of its kinds for each model."""
    best: dict[float, float] = {}
    for p in mappings(saved.get("predictions")):
        model, ms = number(p.get("parameters")), number(p.get("ms"))
        own = (str(p.get("device")), str(p.get("dtype"))) in kinds and p.get("batch") == batch
        if own and model is not None and ms is not None and model > 0 and ms > 0:
            best[model] = min(ms, best.get(model, ms))
    return sorted(best.items())


def _by_size(curves: dict[str, Curve]) -> Table:
    """Times by model size, a column for each curve."""
    sizes = sorted({x for points in curves.values() for x in points.x})
    found = {name: dict(zip(points.x, points.y, strict=True)) for name, points in curves.items()}
    return Table(
        ["parameters", *curves],
        [[parameters(x), *(significant(own.get(x)) for own in found.values())] for x in sizes],
    )


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]

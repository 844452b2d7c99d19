"""What a run gained and forgot, as `lapclip gained` saved it: a page of its own, and a section of the run's report.

Read with care: what is missing or odd is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lapclip.evaluation import RANKS, WAYS
from lapclip.paths import read_json
from lapclip.report.document import Block, Headline, Plot, Report, Section, Sentences, Table
from lapclip.report.plots import COLOURS, DASHES, axes, error_bars, line, marks, table_of
from lapclip.runs.curves import Curve
from lapclip.runs.events import mapping, mappings
from lapclip.text import UNKNOWN, count, interval, number, percent, significant

GAINED = "gained.json"
"""The file that `lapclip gained` writes."""


def gained_sections(folder: Path) -> list[Section]:
    """The section about what was gained that a folder holds, if any."""
    try:
        gained = read_json(folder / GAINED)
    except (OSError, ValueError):
        return []
    if not isinstance(gained, dict):
        return []
    (section,) = sections(gained)
    return [Section(section.title, [Sentences([str(gained.get("summary", ""))]), *section.blocks])]


def gained_report(gained: dict[str, Any]) -> Report:
    """What a run gained and forgot, on its own."""
    title = f"Gained and forgotten: {gained.get('run')}"
    return Report(title, str(gained.get("summary", "")), _headlines(gained), sections(gained))


def sections(gained: dict[str, Any]) -> list[Section]:
    """One section, without the sentence that opens it."""
    recommended = _recommended(gained)
    notes = gained.get("notes")
    blocks: list[Block | None] = [
        Sentences([recommended]) if recommended else None,
        _curves(gained),
        _table(gained),
        _recalls(mapping(gained.get("new")), gained),
        Sentences([str(note) for note in notes]) if isinstance(notes, list) and notes else None,
    ]
    return [Section("Gained and forgotten", [block for block in blocks if block])]


def _recommended(gained: dict[str, Any]) -> str:
    if number(gained.get("alpha")) is None:
        return ""
    written = (
        f" The model at alpha {significant(gained.get('model_alpha'))} is in {gained.get('model')}."
    )
    end = written if gained.get("model") else ""
    return f"Recommended: alpha {significant(gained['alpha'])}, {gained.get('why')}.{end}"


def _headlines(gained: dict[str, Any]) -> list[Headline]:
    alpha = number(gained.get("alpha"))
    lines = [Headline("recommended alpha", significant(alpha), "0 is the start, 1 the end")]
    for found in _sets(gained):
        points = _points(found)
        chosen = next((point for point in points if number(point.get("alpha")) == alpha), None)
        if points and chosen and found.get("decides", True):
            ends = f"{percent(points[0].get('value'))} at the start, {percent(points[-1].get('value'))} at the end"
            lines.append(Headline(_what(found), percent(chosen.get("value")), ends))
    return lines


def _curves(gained: dict[str, Any]) -> Plot | None:
    """Every metric over alpha, with whiskers and the recommended alpha marked."""
    traces, curves = [], {}
    for at, found in enumerate(_sets(gained)):
        points = _points(found)
        if not points:
            continue
        name = _what(found)
        curves[name] = Curve(
            [point["alpha"] for point in points], [point["value"] for point in points]
        )
        colour, dash = COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)]
        sure = error_bars(curves[name].y, [point.get("interval") for point in points])
        drawn = {
            "line": {"color": colour, "width": 2 if at else 3, "dash": dash},
            "mode": "lines+markers",
        }
        error = {**sure, "color": colour, "thickness": 1, "width": 3}
        traces.append(
            line(
                name,
                curves[name],
                colour,
                share=True,
                error_y=error,
                marker={"color": colour},
                **drawn,
            )
        )
    if not traces:
        return None
    alpha = number(gained.get("alpha"))
    layout = axes("alpha: 0 is the start, 1 the end", "score", share=True)
    return Plot(
        "Between start and end",
        traces,
        {**layout, **(marks([(alpha, "recommended")], "--ink") if alpha is not None else {})},
        "The thick line is the new data, the others are checks. Each alpha is a model whose weights are that share of "
        "the way from start to end. Whiskers are 95 % intervals: a fall within them may be noise.",
        table_of("alpha", curves, share=True),
        height=400,
    )


def _table(gained: dict[str, Any]) -> Table | None:
    rows: list[list[Any]] = []
    alpha = number(gained.get("alpha"))
    for found in _sets(gained):
        points = _points(found)
        if not points:
            continue
        chosen = next((point for point in points if point["alpha"] == alpha), {})
        decides = "new data" if "decides" not in found else "yes" if found["decides"] else "no"
        rows.append([
            _what(found), _sure(points[0]), _sure(points[-1]), change(points[-1]),
            _sure(chosen), change(chosen), percent(found.get("chance")), count(found.get("pictures")), decides,
        ])  # fmt: skip
    at = f"at alpha {significant(alpha)}"
    names = [
        "",
        "before",
        "after",
        "change, points",
        at,
        "change, points",
        "chance",
        "images",
        "decides",
    ]
    return Table(names, rows) if rows else None


def _recalls(new: dict[str, Any], gained: dict[str, Any]) -> Table | None:
    """The new data's recalls before and after."""
    columns = [
        ("before", "before"),
        ("after", "after"),
        ("recommended", f"at alpha {significant(gained.get('alpha'))}"),
    ]
    rows: list[list[Any]] = []
    for way, name in WAYS.items():
        for rank in RANKS:
            key = f"{way}_r{rank}"
            values = [mapping(new.get(kind)) for kind, _ in columns]
            if all(number(value.get(key)) is not None for value in values):
                shown = (
                    _both(value[key], mapping(value.get("intervals")).get(key)) for value in values
                )
                rows.append([f"{name}, R@{rank}", *shown])
    asked = [mapping(mapping(new.get(kind)).get("short_questions")) for kind, _ in columns]
    if all(number(found.get("map")) is not None for found in asked):
        rows.append(["short questions, mAP", *(significant(found["map"]) for found in asked)])
    return Table([f"{new.get('name')}", *(name for _, name in columns)], rows) if rows else None


def change(point: dict[str, Any]) -> str:
    """A change in points with its 95 % interval."""
    value, between = number(point.get("change")), point.get("change_interval")
    if value is None:
        return UNKNOWN
    match between:
        case [low, high] if number(low) is not None and number(high) is not None:
            return f"{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    return f"{100 * value:+.1f}"


def _what(found: dict[str, Any]) -> str:
    """A data set by its name, its split and the figure."""
    split = f" ({found['split']})" if found.get("split") else ""
    return f"{found.get('name')}{split}, {found.get('figure')}"


def _sure(point: dict[str, Any]) -> str:
    return _both(point.get("value"), point.get("interval"))


def _both(value: Any, between: Any) -> str:
    """A share with its interval."""
    sure = interval(between)
    return f"{percent(value)} ({sure})" if sure else percent(value)


def _sets(gained: dict[str, Any]) -> list[dict[str, Any]]:
    """The new data and the checks."""
    return [mapping(gained.get("new")), *mappings(gained.get("checks"))]


def _points(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A curve; empty where any of it is odd."""
    points = mappings(found.get("curve"))
    fine = all(number(point.get(key)) is not None for point in points for key in ("alpha", "value"))
    return points if fine else []

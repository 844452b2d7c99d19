"""Charts as plain dictionaries that plotly.js draws; plotly's Python package is never imported.

Colours are names of the page's own ("--blue"), which charts.js looks up, so that one chart serves light and dark.
plotly.js reads simple markup in texts, so every text that comes from outside passes through `plain`.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

from lapclip.report.document import Plot, Table
from lapclip.runs.curves import Curve, samples, thinned
from lapclip.text import UNKNOWN, number, percent, significant

COLOURS = ("--blue", "--orange", "--green", "--purple", "--sky", "--yellow", "--red")
"""Okabe and Ito's palette, which people who see colours differently can tell apart (jfly.uni-koeln.de/color)."""
DASHES = ("solid", "dash", "dot", "dashdot")
NOTEBOOK_COLOURS = {
    "--blue": "#2a8fc7", "--orange": "#e06c1b", "--green": "#1fa67d", "--purple": "#b86a9d",
    "--faint": "#c3cad3", "--muted": "#8b949e", "--ink": "#8b949e", "--red": "#cf4a41",
}  # fmt: skip  # readable on white and on black, because a notebook does not tell which it is


def plain(text: Any) -> str:
    """Text that plotly.js shows as it is."""
    return html.escape(str(text))


def plotly_figure(plot: Plot) -> dict[str, Any]:
    """Return a chart as plotly's own JSON, which notebooks draw."""
    layout = {**plot.layout, "title": {"text": plain(plot.title)}, "height": plot.height}
    figure = json.dumps({"data": plot.traces, "layout": layout})
    for name, colour in NOTEBOOK_COLOURS.items():
        figure = figure.replace(f'"{name}"', f'"{colour}"')
    return json.loads(figure)


def line(
    name: str, points: Curve, colour: str, *, share: bool = False, unit: str = "", **extra: Any
) -> dict[str, Any]:
    """A curve. `share` shows its values as percentages."""
    points = thinned(points)
    value = "%{y:.1%}" if share else "%{y:.4~g}"
    trace = {
        "type": "scatter",
        "mode": "lines",
        "name": plain(name),
        "x": points.x,
        "y": points.y,
        "line": {"color": colour, "width": 2},
        "hovertemplate": f"{plain(name)}: {value}{plain(unit)}<extra></extra>",
    }
    return {**trace, **extra}


def faint(name: str, points: Curve, **extra: Any) -> dict[str, Any]:
    """A raw curve behind its smoothed one."""
    return line(name, points, "--faint", **{"line": {"color": "--faint", "width": 1}, **extra})


def level(
    name: str, x: Sequence[float], value: float, colour: str = "--muted", dash: str = "dash"
) -> dict[str, Any]:
    """A level line from end to end, such as chance."""
    ends = Curve([x[0], x[-1]], [value, value])
    return line(name, ends, colour, share=True, line={"color": colour, "width": 1.5, "dash": dash})


def axes(
    x: str,
    y: str,
    *,
    share: bool = False,
    from_zero: bool = False,
    x_log: bool = False,
    y_log: bool = False,
) -> dict[str, Any]:
    """Both axes with their titles and units."""
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": plain(x)}},
        "yaxis": {"title": {"text": plain(y)}},
    }
    if x == "step":
        layout["xaxis"]["tickformat"] = ","
    if share:
        layout["yaxis"] |= {"tickformat": "~%", "rangemode": "tozero"}
    if from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    for name, logarithmic in (("xaxis", x_log), ("yaxis", y_log)):
        if logarithmic:
            layout[name] |= {
                "type": "log",
                "dtick": 1,
                "exponentformat": "B",
                "tickfont": {"size": 11},
            }
    return layout


def heat(
    x: list[float], rows: list[str], values: list[list[float | None]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Values over x, a row for each name from the top, shaded by powers of ten."""
    shades = [[_shade(value) for value in row] for row in values]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": x,
        "y": [plain(row) for row in rows],
        "z": shades,
        "text": [[significant(value) for value in row] for row in values],
        "hovertemplate": "%{y}, step %{x}: %{text}<extra></extra>",
        "colorscale": "Cividis",
        "colorbar": {
            "orientation": "h",
            "thickness": 10,
            "len": 0.7,
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "tickangle": 0,
        },
        "hoverongaps": False,
    }
    found = [shade for row in shades for shade in row if shade is not None]
    if found:
        low, high = math.floor(min(found)), math.ceil(max(found))
        ticks = list(range(low, high + 1))
        trace["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    layout = {"yaxis": {"autorange": "reversed", "type": "category", "dtick": 1, "showgrid": False}}
    return [trace], layout


def marks(events: list[tuple[float, str]], colour: str = "--red") -> dict[str, Any]:
    """Upright lines with a label at the top of each."""
    shapes = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": colour, "width": 1.5, "dash": "dot"}}
        for x, _ in events
    ]  # fmt: skip
    labels = [
        {"x": x, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "right", "textangle": -90, "showarrow": False,
         "text": plain(label),
         "font": {"color": colour, "size": 11}}
        for x, label in events
    ]  # fmt: skip
    return {"shapes": shapes, "annotations": labels}


def error_bars(values: list[Any], intervals: list[Any]) -> dict[str, Any]:
    """Intervals as whiskers around values."""
    up, down = [], []
    for value, between in zip(values, intervals, strict=True):
        match between:
            case [low, high] if number(low) is not None and number(high) is not None:
                up.append(max(0.0, high - value))
                down.append(max(0.0, value - low))
            case _:
                up.append(0.0)
                down.append(0.0)
    ends = {"array": up, "arrayminus": down}
    return {
        "type": "data",
        "symmetric": False,
        "thickness": 1.5,
        "width": 4,
        "color": "--ink",
        **ends,
    }


def table_of(x: str, curves: dict[str, Curve], *, share: bool = False) -> Table:
    """A few points of some curves, as a table. The longest curve gives the rows."""
    shown = percent if share else significant
    longest = max(curves.values(), key=len)
    rows: list[list[Any]] = []
    for at in samples(len(longest)):
        x_value = longest.x[at]
        rows.append(
            [
                significant(x_value, 6),
                *(_near(points, x_value, shown) for points in curves.values()),
            ]
        )
    return Table([x, *curves], rows)


def _near(points: Curve, x: float, shown: Any) -> str:
    """The latest value at or before x."""
    before = [y for at, y in zip(points.x, points.y, strict=True) if at <= x]
    return shown(before[-1]) if before else UNKNOWN


def _shade(value: float | None) -> float | None:
    found = number(value)
    return math.log10(found) if found and found > 0 else None

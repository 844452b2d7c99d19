"""The line charts of reports as SVG: small, and shown where no script runs, as below a notebook's cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lapclip.report.document import Plot, escaped
from lapclip.text import percent, significant

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460, 52, 12, 28, 36
LETTER = 6.2
"""Pixels that a letter of a legend takes, about."""
COLOURS = {
    "--blue": "#2a8fc7", "--orange": "#e06c1b", "--green": "#1fa67d", "--purple": "#b86a9d", "--sky": "#5aa9d6",
    "--yellow": "#c4931c", "--red": "#cf4a41", "--faint": "currentColor", "--muted": "currentColor",
    "--ink": "currentColor",
}  # fmt: skip
"""The page's colours, as they are seen on white and on black: a notebook does not tell which it is."""
PALE = {"--faint": 0.25, "--muted": 0.6}
DASHES = {"dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}


def to_svg(plots: Sequence[Plot]) -> str:
    """Charts side by side, in one picture that shrinks with the page."""
    highest = max((plot.height for plot in plots), default=0)
    drawn = [_chart(plot, highest) for plot in plots]
    height = max((height for _, height in drawn), default=0)
    charts = "".join(
        f'<g transform="translate({at * WIDTH},0)">{markup}</g>'
        for at, (markup, _) in enumerate(drawn)
    )
    width = WIDTH * len(plots)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'style="max-width:100%;height:auto;font:11px system-ui,sans-serif" fill="currentColor">{charts}</svg>'
    )


def _chart(plot: Plot, height: int) -> tuple[str, int]:
    """A chart, and how high it is with its legend."""
    traces = [trace for trace in plot.traces if trace.get("type") == "scatter" and trace["x"]]
    share = "%" in plot.layout.get("yaxis", {}).get("tickformat", "")
    from_zero = plot.layout.get("yaxis", {}).get("rangemode") == "tozero"
    floor = height - BOTTOM
    left, right = _ends(trace["x"] for trace in traces)
    low, high = _ends([*(trace["y"] for trace in traces), *([[0.0]] if from_zero else [])])
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(value: float) -> float:
        return LEFT + (value - left) / ((right - left) or 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return floor - (value - low) / ((high - low) or 1) * (floor - TOP)

    parts = [
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{escaped(plot.title)}</text>'
    ]
    for tick in ticks:
        text = percent(tick, 0) if share else f"{tick:.10g}"
        parts.append(_line([(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))], "currentColor", 1, 0.15))
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" opacity=".7">{text}</text>'
        )
    for tick in _ticks(left, right):
        if left <= tick <= right:
            parts.append(
                f'<text x="{x(tick):.1f}" y="{floor + 16}" text-anchor="middle" opacity=".7">{tick:,.10g}</text>'
            )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{floor + 30}" text-anchor="end" opacity=".7">step</text>'
    )
    for trace in traces:
        parts += _trace(trace, x, y, share)
    legend, rows = _legend(traces, floor + 44)
    return "".join([*parts, legend]), floor + 44 + 16 * rows


def _trace(trace: dict[str, Any], x: Any, y: Any, share: bool) -> Iterator[str]:
    colour, width, opacity, dash = _style(trace)
    points = [(x(across), y(up)) for across, up in zip(trace["x"], trace["y"], strict=True)]
    yield _line(points, colour, width, opacity, dash)
    if "markers" not in trace.get("mode", ""):
        return
    errors = trace.get("error_y") or {}
    for at, (across, up) in enumerate(points):
        if errors:
            above, below = (
                trace["y"][at] + sign * errors[end][at]
                for sign, end in ((1, "array"), (-1, "arrayminus"))
            )
            yield _line([(across, y(above)), (across, y(below))], colour, 1, 0.6)
        value = percent(trace["y"][at]) if share else significant(trace["y"][at])
        yield (
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}">'
            f"<title>{trace['name']} at step {trace['x'][at]:,.10g}: {value}</title></circle>"
        )


def _style(trace: dict[str, Any]) -> tuple[str, float, float, str]:
    name = trace["line"]["color"]
    return (
        COLOURS[name],
        trace["line"]["width"],
        PALE.get(name, 1.0),
        DASHES.get(trace["line"].get("dash", ""), ""),
    )


def _line(
    points: Sequence[tuple[float, float]], colour: str, width: float, opacity: float, dash: str = ""
) -> str:
    path = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"{dashes}/>'


def _legend(traces: Sequence[dict[str, Any]], top: int) -> tuple[str, int]:
    """The names of the lines, in as many rows as they take."""
    parts, across, row = [], LEFT, 0
    for trace in traces:
        width = 26 + LETTER * len(trace["name"]) + 12
        if across + width > WIDTH and across > LEFT:
            across, row = LEFT, row + 1
        colour, stroke, opacity, dash = _style(trace)
        up = top + 16 * row
        parts.append(
            _line([(across, up - 4), (across + 20, up - 4)], colour, max(2, stroke), opacity, dash)
        )
        parts.append(f'<text x="{across + 26}" y="{up}">{trace["name"]}</text>')
        across += round(width)
    return "".join(parts), row + 1


def _ends(values: Iterable[Sequence[float]]) -> tuple[float, float]:
    every = [value for each in values for value in each if math.isfinite(value)]
    return (min(every), max(every)) if every else (0.0, 1.0)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from below the lowest value to above the highest."""
    rough = (high - low) / about or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]

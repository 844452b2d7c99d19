"""The panels of a run: what is wrong, whether it learns, what the machine does, what happened; and what they share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lapclip.runs.curves import Curve
from lapclip.runs.view import RunView
from lapclip.text import UNKNOWN, count, metric_title, number, one_line, percent, significant, size

FRAMED = 60
"""Columns from which on a panel has a frame."""
LABEL, SHORT_LABEL = 12, 8
"""Columns of the label in front of values."""
SEVERITIES = {"alarm": "bold red", "warning": "yellow", "note": "blue"}
PHASE_COLOURS = {
    "load": "red",
    "preprocess": "yellow",
    "transfer": "magenta",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "green",
    "exchange": "bright_magenta",
}
OTHER_COLOURS = ("bright_blue", "bright_magenta", "bright_yellow", "bright_green")
NOTABLE = 0.005
"""Of a step's time, below which a phase is not shown."""


@dataclass(frozen=True)
class Canvas:
    """What a panel is drawn on."""

    width: int
    curve_height: int = 2
    """Lines of a large curve."""
    colour: bool = True
    framed: bool = True

    @classmethod
    def of(cls, console: Console, width: int, curve_height: int = 2) -> Canvas:
        """What this console can show."""
        colour = console.color_system is not None and not console.no_color
        return cls(width, curve_height, colour, width >= FRAMED)

    @property
    def inside(self) -> int:
        return self.width - 4 if self.framed else self.width

    def narrower(self, width: int) -> Canvas:
        return replace(self, width=width)


def alarms(view: RunView, canvas: Canvas, most: int, doctor: str) -> RenderableType | None:
    """What is wrong, in plain words, the worst first."""
    found = view.alarms
    if not found:
        return None
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in found[:most]:
        style = SEVERITIES.get(finding.severity, "")
        text = Text(one_line(finding.title), style=style)
        text.append("\n" + one_line(finding.evidence), style="default not bold dim")
        text.append("\n" + one_line(finding.next), style="default not bold")
        grid.add_row(Text("!" if finding.severity != "note" else "i", style=style), text)
    if len(found) > most:
        grid.add_row("", Text(f"{len(found) - most} more: {doctor}", style="dim"))
    worst = SEVERITIES.get(found[0].severity, "dim")
    return _section(
        {"alarm": "Alarm", "warning": "Warning"}.get(found[0].severity, "Note"), grid, canvas, worst
    )


def happened(view: RunView, canvas: Canvas, most: int = 3) -> RenderableType | None:
    """The latest fallbacks, pauses and resumes, the newest last."""
    # What the top of the screen says already is not repeated.
    repeated = (
        view.status in ("failed", "paused", "stopped")
        and view.notices
        and view.notices[-1].type == view.status
    )
    latest = (view.notices[:-1] if repeated else view.notices)[-most:]
    if not latest:
        return None
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for notice in latest:
        after = f"after step {notice.step:,}: " if notice.step else ""
        grid.add_row(
            clock(notice.time), Text(after + notice.text, style="yellow" if notice.bad else "")
        )
    return _section("What happened", grid, canvas)


def learning(view: RunView, canvas: Canvas) -> RenderableType | None:
    """Draw loss, accuracy, temperature, further metrics and gradient with their curves."""
    if not view.summary.steps:
        return None
    rows = _rows()
    metrics = [
        (name, metric_title(name).lower().removesuffix(" loss"), "magenta", 1, significant)
        for name in view.metrics
    ]
    curves = (
        ("loss", "loss", "blue", canvas.curve_height, significant),
        ("accuracy", "accuracy", "green", canvas.curve_height, percent),
        ("temperature", "temperature", "magenta", 1, significant),
        *metrics,
        ("gradient", "gradient", "yellow", 1, significant),
    )
    for name, label, colour, height, text in curves:
        points = view.small_curve(name)
        latest = text(points.y[-1]) if points else UNKNOWN
        rows.add_row(label, _latest_and_curve(latest, points, height, colour, canvas))
    return _section(
        "Learning, in training batches" if canvas.inside > 40 else "Learning", rows, canvas
    )


def recall(view: RunView, canvas: Canvas) -> RenderableType | None:
    """Held-out recall at each evaluation, the best marked; of a finished run, its final metrics."""
    summary = view.summary
    if not summary.evaluations and not summary.ending.get("evaluation"):
        if not summary.steps:
            return None
        return _section("Held-out recall", Text("not evaluated yet", style="dim"), canvas)
    points = view.recall
    parts: list[RenderableType] = []
    if len(points) > 1:
        rows = _rows()
        kept = percent(points.y[-1] if view.best_recall is None else view.best_recall)
        line = _latest_and_curve(kept, points, canvas.curve_height, "cyan", canvas)
        rows.add_row(f"{one_line(summary.evaluations[-1].get('split') or 'val')} R@1", line)
        parts.append(rows)
    parts.append(
        _final_metrics(view)
        if summary.ending.get("type") == "finished"
        else _evaluations(view, canvas)
    )
    if (step := summary.progress.best_step) is not None:
        parts.append(Text(f"The model of step {step:,} is kept. {view.trend}", style="dim"))
    return _section("Held-out recall", Group(*parts), canvas)


def _evaluations(view: RunView, canvas: Canvas) -> Table:
    """The latest evaluations, the newest first; the best is always among them."""
    events, most = view.summary.evaluations, 2 + canvas.curve_height
    shown = events[-most:]
    best = view.best_evaluation
    if best is not None and best not in shown:
        shown = [best, *shown[1:]]
    tight, split = canvas.inside < 44, one_line(events[-1].get("split") or "val")
    grid = _table(
        (
            f"{split} epoch",
            "to image" if tight else "text to image",
            "to text" if tight else "image to text",
            "",
        )
    )
    for event in reversed(shown):
        scores = event["evaluation"]
        style = "bold green" if event is best else ""
        mark = "kept" if event is best else ""
        recalls = percent(scores.get("t2i_r1")), percent(scores.get("i2t_r1"))
        grid.add_row(count(event.get("epoch")), *recalls, mark, style=style)
    if (chance := number(events[-1]["evaluation"].get("chance"))) is not None:
        grid.add_row("chance", percent(chance), percent(chance), "", style="dim")
    return grid


def _final_metrics(view: RunView) -> Group:
    scores = view.summary.scores
    grid = _table((one_line(scores.get("split") or ""), "R@1", "R@5", "R@10"))
    for way, name in (("t2i", "text to image"), ("i2t", "image to text")):
        grid.add_row(
            name, *(percent(scores.get(f"{way}_r{rank}")) for rank in (1, 5, 10)), style="bold"
        )
    if (chance := number(scores.get("chance"))) is not None:
        grid.add_row(
            "chance", *(percent(min(1.0, rank * chance)) for rank in (1, 5, 10)), style="dim"
        )
    sure = ""
    intervals = scores.get("intervals")
    match intervals.get("t2i_r1") if isinstance(intervals, dict) else None:
        case [low, high] if number(low) is not None and number(high) is not None:
            sure = f", text to image R@1 {percent(low)} to {percent(high)}"
    candidates = (
        [Text(f"{count(scores.get('candidates'))} candidates{sure} (95 %)", style="dim")]
        if sure
        else []
    )
    return Group(grid, *candidates)


def _table(titles: Sequence[str]) -> Table:
    """Columns of numbers under short titles."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at == 0 or not title else "right", no_wrap=True)
    return table


def step_phases(view: RunView, canvas: Canvas) -> RenderableType | None:
    """Where the time of a step goes, as one bar."""
    phases = view.summary.phases()
    total = sum(phases.values())
    phases = {name: seconds for name, seconds in phases.items() if seconds > NOTABLE * total}
    if not total:
        return None
    colours = {
        name: PHASE_COLOURS.get(name, OTHER_COLOURS[at % 4]) for at, name in enumerate(phases)
    }
    drawn, legend = Text(no_wrap=True), [Text()]
    widths = split(list(phases.values()), canvas.inside)
    for (name, seconds), width in zip(phases.items(), widths, strict=True):
        # Without colours a phase is known by the first letter of its name.
        mark = "█" if canvas.colour else one_line(name)[:1].upper()
        drawn.append(mark * width, style=colours[name])
        entry = Text.assemble(
            ("■" if canvas.colour else mark, colours[name]),
            f" {one_line(name)} {seconds / total:.0%}",
        )
        if legend[-1] and len(legend[-1]) + 2 + len(entry) > canvas.inside:
            legend.append(Text())
        legend[-1].append_text(Text("  " if legend[-1] else "") + entry)
    milliseconds = f"{significant(total * 1000)} ms" if total < 1 else f"{significant(total)} s"
    return _section(f"A step: {milliseconds}", Group(drawn, *legend), canvas)


def machine(view: RunView, canvas: Canvas) -> RenderableType | None:
    """Memory, cores, energy, heat and the clock of the processor."""
    rows, room = _rows(SHORT_LABEL), canvas.inside - SHORT_LABEL
    process, peak, whole = view.memory
    if peak is not None:
        now = f"{size(process)} now, " if process is not None and view.working else ""
        of = f" of {size(whole)}" if whole else ""
        rows.add_row("memory", Text(_fitting(room, f"{now}{size(peak)} peak", of)))
    if view.core_use:
        mean = sum(view.core_use) / len(view.core_use)
        rows.add_row("cores", Text(f"{mean:.0%} in use"))
    if view.sensors:
        rows.add_row("energy", _energy(view, room))
        celsius, megahertz = (
            number(view.sensors.get("celsius")),
            number(view.sensors.get("megahertz")),
        )
        heat = [f"{celsius:.0f} °C"] if celsius is not None else []
        if view.sensors.get("throttled") is True:
            rows.add_row("heat", Text(", ".join([*heat, "slowed down by heat"]), style="bold red"))
        elif heat:
            rows.add_row("heat", Text(heat[0]))
        if megahertz:
            rows.add_row("clock", Text(f"{megahertz:,.0f} MHz"))
        if swap := number(view.sensors.get("swap_bytes")):
            rows.add_row("swap", Text(f"{size(swap)} in use"))
    return _section("Machine", rows, canvas) if rows.row_count else None


def _energy(view: RunView, room: int) -> Text:
    reason = one_line(view.sensors.get("reason") or "").removeprefix("not measurable here: ")
    if view.joules is None:
        return Text(f"not measurable here: {reason or 'no reason was recorded'}", style="dim")
    watts = f", {significant(view.watts)} W" if view.watts is not None and view.working else ""
    hours = f", {significant(view.joules / 3600)} Wh" if view.joules > 360 else ""
    least = "at least " if view.joules_at_least else ""
    return Text(_fitting(room, f"{least}{significant(view.joules)} J{watts}", hours))


def _section(
    title: str, body: RenderableType, canvas: Canvas, style: str = "dim"
) -> RenderableType:
    """A titled part of the screen: framed where there is room."""
    if not canvas.framed:
        return Group(
            Text(f"{title} {'─' * max(0, canvas.width - len(title) - 1)}", style="bold"), body
        )
    return Panel(
        body,
        title=Text(title, style="bold"),
        title_align="left",
        border_style=style,
        box=box.ROUNDED,
        width=canvas.width,
        padding=(0, 1),
    )


def _rows(label: int = LABEL) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=label - 1, no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    return grid


def _latest_and_curve(
    latest: str, points: Curve, height: int, colour: str, canvas: Canvas
) -> Table:
    """The latest value, and beside it the curve that led there."""
    lines = curve(points, max(4, canvas.inside - LABEL - 9), height)
    line = Table.grid(padding=(0, 1))
    line.add_column(width=8, no_wrap=True)
    line.add_column(no_wrap=True)
    line.add_row(Text(latest, style="bold"), Text("\n".join(lines), style=colour, no_wrap=True))
    return line


def _fitting(room: int, text: str, more: str) -> str:
    """Both, or the first alone where there is no room for more."""
    return text + more if len(text + more) <= room else text


def clock(seconds: float) -> str:
    """A moment as hours and minutes here."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%H:%M")
    except (OverflowError, OSError, ValueError):  # a clock that was set to nonsense
        return UNKNOWN


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dot of each row and column of a braille character."""


def curve(points: Curve, width: int, height: int = 1) -> list[str]:
    """A curve over the whole width, as `height` lines of text; empty lines where there are no points."""
    if not points or width < 1:
        return [" " * max(0, width)] * height
    values = evenly(points, 2 * width)
    low, high, top = min(values), max(values), 4 * height - 1
    # A level curve runs through the middle; a bottom line would look like zero.
    rows = [
        top - (round((value - low) / (high - low) * top) if high > low else top // 2)
        for value in values
    ]
    cells = [[0] * width for _ in range(height)]
    for at, row in enumerate(rows):
        before = rows[at - 1] if at else row
        # A steep stretch is drawn as an upright line, half of it in each column, so that the curve does not break.
        for dot in range(min(row, _halfway(before, row)), max(row, _halfway(before, row)) + 1):
            cells[dot // 4][at // 2] |= _DOTS[dot % 4][at % 2]
        if at and abs(before - row) > 1:
            half = _halfway(before, row)
            for dot in range(min(before, half), max(before, half) + 1):
                cells[dot // 4][(at - 1) // 2] |= _DOTS[dot % 4][(at - 1) % 2]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def evenly(points: Curve, count: int) -> list[float]:
    """`count` values at even distances of x: means where points are dense, on the line between them where they are not.

    Of a long run steps are known at uneven distances, so places go by x and not by order.
    """
    first, reach = points.x[0], points.x[-1] - points.x[0]
    if reach <= 0:
        return [points.y[-1]] * count
    found: list[list[float]] = [[] for _ in range(count)]
    for x, y in zip(points.x, points.y, strict=True):
        found[min(count - 1, int((x - first) / reach * count))].append(y)
    means = {at: math.fsum(values) / len(values) for at, values in enumerate(found) if values}
    for before, after in itertools.pairwise(sorted(means)):
        for at in range(before + 1, after):
            means[at] = means[before] + (means[after] - means[before]) * (at - before) / (
                after - before
            )
    return [means[at] for at in range(count)]


def bar(part: float, width: int) -> tuple[str, str]:
    """A progress bar, done and to do."""
    part = min(1.0, max(0.0, part))
    halves = int(part * width * 2)
    done = "━" * (halves // 2) + ("╸" if halves % 2 else "")
    return done, "─" * (width - len(done))


def split(parts: Sequence[float], width: int) -> list[int]:
    """Whole characters for each part of a bar: together the width, none that is there left out."""
    total = math.fsum(parts)
    if not total or width < 1:
        return [0] * len(parts)
    counts = [max(1, int(part / total * width)) if part else 0 for part in parts]
    while sum(counts) != width:
        change = 1 if sum(counts) < width else -1
        # Give to the part that is most too short, take from the one most too long.
        wrong = [part / total * width - count for part, count in zip(parts, counts, strict=True)]
        may = [at for at, count in enumerate(counts) if count + change >= 1 and parts[at]]
        if not may:
            break
        counts[max(may, key=lambda at: wrong[at] * change)] += change
    return counts


def _halfway(first: int, second: int) -> int:
    return (first + second) // 2 if abs(first - second) > 1 else second

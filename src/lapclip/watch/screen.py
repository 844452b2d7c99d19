"""The whole screen: a row for each run, and the one in focus in full, put together for a width and a height."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lapclip.runs.messages import stopped_by
from lapclip.runs.view import RunView
from lapclip.suggest import quoted
from lapclip.text import (
    UNKNOWN,
    duration,
    duration_range,
    one_line,
    percent,
    short_duration,
    significant,
)
from lapclip.watch.panels import (
    SEVERITIES,
    Canvas,
    alarms,
    bar,
    clock,
    happened,
    learning,
    machine,
    recall,
    step_phases,
)

STATE_STYLES = {
    "running": "bold green",
    "starting": "bold green",
    "paused": "bold yellow",
    "finished": "bold cyan",
    "stopped": "bold yellow",
    "failed": "bold red",
    "died": "bold red",
    "gone": "bold red",
}
TWO_COLUMNS = 76
"""Columns from which on panels stand side by side."""

Typed = Callable[[str], str]
"""Turns the arguments of a command into what can be typed here."""


def next_commands(view: RunView, typed: Typed) -> list[str]:
    """What a person would do now."""
    match view.status:
        case "finished":
            return [typed(f"eval {quoted(view.name)}"), typed(f"report {quoted(view.name)}")]
        case "failed" if hint := view.error[1]:
            return [hint]
        case "died" | "stopped" | "failed":
            return [typed(f"resume {quoted(view.name)}")]
        case "running" | "paused" | "starting":
            return [typed(f"stop {quoted(view.name)}")]
        case "gone":
            return [typed("runs")]
    return [typed("train")]


def draw(views: list[RunView], focus: int, canvas: Canvas, typed: Typed) -> RenderableType:
    """Everything, from top to bottom."""
    listed = [_table(views, focus, canvas), Text("")] if len(views) > 1 else []
    return Group(*listed, *_in_full(views[focus], canvas, typed))


def _table(views: list[RunView], focus: int, canvas: Canvas) -> Table:
    """A row for each run; what there is no room for is left out."""
    width = canvas.width
    middle = width >= 70
    room = width - (44 if middle else 28)  # what is left beside the columns of numbers
    names = min(
        max(len(one_line(view.name)) for view in views),
        max(8, room // 2) if middle else max(4, room),
    )
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("", width=1)
    grid.add_column("run", no_wrap=True, overflow="ellipsis", width=names)
    grid.add_column("state", no_wrap=True)
    grid.add_column("done", no_wrap=True)
    grid.add_column("loss", no_wrap=True, justify="right")
    if middle:
        grid.add_column("val R@1", no_wrap=True, justify="right")
        grid.add_column("left", no_wrap=True, justify="right")
    for at, view in enumerate(views):
        done, rest = bar(view.progress, room - names if middle else 0)
        progress = Text.assemble((done, "green"), (rest, "dim"), f" {view.progress:4.0%}")
        loss = view.small_curve("loss").y
        cells: list[RenderableType] = [
            Text(">" if at == focus else " ", style="bold"),
            Text(one_line(view.name), style="bold" if at == focus else ""),
            Text.assemble((view.status, STATE_STYLES.get(view.status, "")), _mark(view)),
            progress,
            significant(loss[-1]) if loss else UNKNOWN,
        ]
        if middle:
            left = short_duration(view.time_left.seconds) if view.time_left else UNKNOWN
            cells += [percent(view.best_recall), left]
        grid.add_row(*cells)
    return grid


def _mark(view: RunView) -> Text:
    """An exclamation mark at a run with something wrong."""
    serious = [finding.severity for finding in view.alarms if finding.severity != "note"]
    return Text(" !", style=SEVERITIES[serious[0]]) if serious else Text("")


def _in_full(view: RunView, canvas: Canvas, typed: Typed) -> list[RenderableType]:
    """One run with all its panels."""
    width = canvas.width
    doctor = typed(f"doctor {quoted(view.name)}")
    top: list[RenderableType | None] = [
        _title(view, width),
        *_progress(view, canvas),
        *_ending(view, typed),
        alarms(view, canvas, most=3 if canvas.framed else 2, doctor=doctor),
    ]
    if width >= TWO_COLUMNS:
        left, right = canvas.narrower(width - width // 2), canvas.narrower(width // 2)
        columns = (
            [learning(view, left), step_phases(view, left)],
            [recall(view, right), machine(view, right)],
        )
        grid = Table.grid()
        grid.add_column(width=left.width)
        grid.add_column(width=right.width)
        grid.add_row(
            *(Group(*(panel for panel in column if panel is not None)) for column in columns)
        )
        body: list[RenderableType | None] = [
            grid if view.summary.steps or view.summary.evaluations else None
        ]
    else:
        body = [draw(view, canvas) for draw in (learning, recall, step_phases, machine)]
    return [
        panel
        for panel in (*top, *body, happened(view, canvas, most=canvas.curve_height))
        if panel is not None
    ]


def _title(view: RunView, width: int) -> Text:
    text = Text.assemble(
        (one_line(view.name), "bold"),
        "  ",
        (view.status, STATE_STYLES.get(view.status, "")),
        no_wrap=True,
        overflow="ellipsis",
    )
    if view.epoch and view.epochs:
        text.append(
            f"  epoch {view.epoch} of {view.epochs}"
            if view.working
            else f"  {view.epoch} of {view.epochs} epochs"
        )
    speed = view.summary.pairs_per_second
    devices = f"on {one_line(view.devices_text(view.devices))}" if view.devices else ""
    facts = " ".join(filter(None, [f"{speed:,.0f} pairs/s" if speed else "", devices]))
    if facts and len(text.plain) + len(facts) + 2 <= width:
        text.append(" " * (width - len(text.plain) - len(facts)))
        text.append(facts, style="dim")
    return text


def _progress(view: RunView, canvas: Canvas) -> list[Text]:
    total = view.summary.total_steps
    if not total:
        return []
    counted = f" {view.summary.step:,} of {total:,}  {view.progress:.0%}"
    if view.ended_early:
        counted = f" ended early, after step {view.summary.step:,} of {total:,}"
    done, rest = bar(view.progress, canvas.width - len(counted))
    lines = [
        Text.assemble(
            (done, "green" if view.working else STATE_STYLES[view.status]), (rest, "dim"), counted
        )
    ]
    if view.status == "running":
        lines += _time_left(view, canvas.width)
    return lines


def _time_left(view: RunView, width: int) -> list[Text]:
    if view.silent_seconds:
        return [
            Text(
                f"no event for {duration(view.silent_seconds)}: asleep, or stuck",
                style="bold yellow",
            )
        ]
    left = view.time_left
    if left is None:
        return [Text("time left: known after a few steps", style="dim")]
    sure = duration_range(left.low, left.high)
    parts = [
        f"{duration(left.seconds)} left",
        f"likely {sure}" if sure else "",
        f"done about {clock(time.time() + left.seconds)}" if left.seconds < 20 * 3600 else "",
    ]
    line = Text(style="default")
    for at, text in enumerate(filter(None, parts)):
        if at and len(line.plain) + len(text) + 2 > width:
            break
        line.append(("  " if at else "") + text, style="bold" if at == 0 else "default")
    return [line]


def _ending(view: RunView, typed: Typed) -> list[Text]:
    """How a run that does not work stands, in a sentence, and the command that follows."""
    step, ending = f"{view.summary.step:,}", view.summary.ending
    took = duration(view.summary.training_seconds)
    sentence = {
        "finished": f"Finished in {took} of training.",
        "stopped": one_line(f"Stopped after step {step}{stopped_by(ending)}; all is saved."),
        "failed": f"Failed after step {step}: {view.error[0]}"
        if view.summary.started
        else f"Did not start: {view.error[0]}",
        "died": f"Ended without a word after step {step}; its last checkpoint is there.",
        "paused": f"Paused: {view.pause_reason}. It goes on by itself.",
        "starting": "Waiting for the first step."
        if view.summary.started
        else "Getting ready: data, then the model.",
        "gone": "Its folder was deleted.",
    }.get(view.status)
    if sentence is None:
        return []
    style = (
        "bold red"
        if view.state in ("failed", "died", "gone")
        else "yellow"
        if view.status == "paused"
        else "default"
    )
    commands = next_commands(view, typed) if view.status not in ("paused", "starting") else []
    label = "Go on: " if view.state in ("stopped", "died") else "Next: "
    lines = [
        f"{label if at == 0 else ' ' * len(label)}{command}" for at, command in enumerate(commands)
    ]
    return [
        Text(sentence, style=style, overflow="fold"),
        *(Text(line, overflow="fold") for line in lines),
    ]

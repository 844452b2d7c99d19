"""The whole image: a row of each run, the one in focus in full, put together for a width and a height."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lapclip.text import UNKNOWN, duration, duration_range, one_line, percent, short_duration, significant
from lapclip.watch import sparklines as sparks
from lapclip.watch.canvas import BOXED, Paper
from lapclip.watch.findings_panel import SEVERITIES, alarms, clock, happened, silence
from lapclip.watch.learning_panels import learning, recall
from lapclip.watch.machine_panels import machine, step_phases
from lapclip.watch.run_view import Look

STATE_STYLES = {
    "running": "bold green",
    "starting": "bold green",
    "paused": "bold yellow",
    "waiting": "bold blue",
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


@dataclass(frozen=True)
class Pens:
    """How a console can draw."""

    plain: bool
    colour: bool

    @classmethod
    def of(cls, console: Console) -> Pens:
        return cls(not console.encoding.startswith("utf"), console.color_system is not None and not console.no_color)


def next_commands(look: Look, typed: Typed) -> list[str]:
    """What a person would do now."""
    match look.state:
        case "finished":
            return [typed(f"eval {look.name}"), typed(f"report {look.name}")]
        case "failed" if not look.summary.ending:
            return [typed("train")]
        case "failed" if hint := _error(look)[1]:
            return [hint]
        case "died" | "stopped" | "failed":
            return [typed(f"resume {look.name}")]
        case "running" | "paused" | "starting":
            return [typed(f"stop {look.name}")]
        case "gone":
            return [typed("runs")]
    return [typed("train")]


def image(looks: list[Look], focus: int, width: int, tall: int, pens: Pens, typed: Typed) -> RenderableType:
    """Everything, from top to bottom."""
    if not looks:
        return Text(f"There are no runs here yet. One that starts will appear.\nStart one: {typed('train')}")
    listed = [table(looks, focus, width, pens), Text("")] if len(looks) > 1 else []
    return Group(*listed, *full(looks[focus], width, tall, pens, typed))


def table(looks: list[Look], focus: int, width: int, pens: Pens) -> Table:
    """A row of each run; what there is no room for is left out."""
    middle = width >= 70
    room = width - (44 if middle else 28)  # what is left beside the columns of figures
    names = min(max(len(one_line(look.name)) for look in looks), max(8, room // 2) if middle else max(4, room))
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("", width=1)
    grid.add_column("run", no_wrap=True, overflow="ellipsis", width=names)
    grid.add_column("state", no_wrap=True)
    grid.add_column("done", no_wrap=True)
    grid.add_column("loss", no_wrap=True, justify="right")
    if middle:
        grid.add_column("best R@1", no_wrap=True, justify="right")
        grid.add_column("left", no_wrap=True, justify="right")
    for at, look in enumerate(looks):
        done, rest = sparks.bar(look.progress, room - names if middle else 0, pens.plain)
        bar = Text.assemble((done, "green"), (rest, "dim"), f" {look.progress:4.0%}")
        loss = look.loss.y
        cells: list[RenderableType] = [
            Text(">" if at == focus else " ", style="bold"),
            Text(one_line(look.name), style="bold" if at == focus else ""),
            Text.assemble((look.state, STATE_STYLES.get(look.state, "")), _mark(look)),
            bar,
            significant(loss[-1]) if loss else UNKNOWN,
        ]
        if middle:
            left = short_duration(look.time_left.seconds) if look.time_left else UNKNOWN
            cells += [percent(look.best_recall), left]
        grid.add_row(*cells)
    return grid


def _mark(look: Look) -> Text:
    """An exclamation mark at a run with something wrong."""
    serious = [finding.severity for finding in look.alarms if finding.severity != "note"]
    return Text(" !", style=SEVERITIES[serious[0]]) if serious else Text("")


def full(look: Look, width: int, tall: int, pens: Pens, typed: Typed) -> list[RenderableType]:
    """One run with all its panels."""
    framed = width >= BOXED
    paper = Paper(width, tall, pens.plain, pens.colour, framed)
    doctor = typed(f"doctor {look.name}")
    top: list[RenderableType | None] = [
        _title(look, width),
        *_progress(look, width, pens),
        *_ending(look, typed),
        alarms(look, paper, most=3 if framed else 2, doctor=doctor),
    ]
    if width >= TWO_COLUMNS:
        left, right = paper.narrower(width - width // 2), paper.narrower(width // 2)
        columns = (
            [learning(look, left), step_phases(look, left)],
            [recall(look, right), machine(look, right)],
        )
        grid = Table.grid()
        grid.add_column(width=left.width)
        grid.add_column(width=right.width)
        grid.add_row(*(Group(*(panel for panel in column if panel is not None)) for column in columns))
        body: list[RenderableType | None] = [grid if look.summary.steps or look.summary.evaluations else None]
    else:
        body = [draw(look, paper) for draw in (learning, recall, step_phases, machine)]
    return [panel for panel in (*top, *body, happened(look, paper, most=tall)) if panel is not None]


def _title(look: Look, width: int) -> Text:
    text = Text.assemble(
        (one_line(look.name), "bold"),
        "  ",
        (look.state, STATE_STYLES.get(look.state, "")),
        no_wrap=True,
        overflow="ellipsis",
    )
    if look.epoch and look.epochs:
        text.append(
            f"  epoch {look.epoch} of {look.epochs}" if look.working else f"  {look.epoch} of {look.epochs} epochs"
        )
    speed = look.summary.pairs_per_second
    facts = [f"{speed:,.0f} pairs/s" if speed else "", f"on {one_line(look.places)}" if look.places else ""]
    said = " ".join(filter(None, facts))
    if said and len(text.plain) + len(said) + 2 <= width:
        text.append(" " * (width - len(text.plain) - len(said)))
        text.append(said, style="dim")
    return text


def _progress(look: Look, width: int, pens: Pens) -> list[Text]:
    total = look.summary.total_steps
    if not total:
        return []
    counted = f" {look.summary.step:,} of {total:,}  {look.progress:.0%}"
    done, rest = sparks.bar(look.progress, width - len(counted), pens.plain)
    lines = [Text.assemble((done, "green" if look.working else STATE_STYLES[look.state]), (rest, "dim"), counted)]
    if look.state == "running":
        lines += _time_left(look, width)
    return lines


def _time_left(look: Look, width: int) -> list[Text]:
    if word := silence(look):
        return [Text(word, style="bold yellow")]
    left = look.time_left
    if left is None:
        return [Text("time left: known after a few steps", style="dim")]
    sure = duration_range(left.low, left.high)
    parts = [
        f"{duration(left.seconds)} left",
        f"likely {sure}" if sure else "",
        f"done about {clock(time.time() + left.seconds)}" if left.seconds < 20 * 3600 else "",
    ]
    line = Text(style="default")
    for at, words in enumerate(filter(None, parts)):
        if at and len(line.plain) + len(words) + 2 > width:
            break
        line.append(("  " if at else "") + words, style="bold" if at == 0 else "default")
    return [line]


def _ending(look: Look, typed: Typed) -> list[Text]:
    """How a run that does not work stands, in a sentence, and the command that follows."""
    step, ending = f"{look.summary.step:,}", look.summary.ending
    took = duration(look.summary.training_seconds)
    said = {
        "finished": f"Finished in {took} of training.",
        "stopped": f"Stopped after step {step} ({one_line(ending.get('reason') or 'no reason given')}); all is saved.",
        "failed": f"Failed after step {step}: {_error(look)[0]}" if ending else f"Did not start: see {look.log}",
        "died": f"Ended without a word after step {step}; its last checkpoint is kept.",
        "paused": f"Paused: {look.pause_reason}. It goes on by itself.",
        "starting": "Waiting for the first step." if look.summary.started else "Getting ready: data, then the model.",
        "waiting": f"There is no run called {one_line(look.name)} yet. It will appear here when it starts.",
        "gone": "Its folder was deleted.",
    }.get(look.state)
    if said is None:
        return []
    style = (
        "bold red" if look.state in ("failed", "died", "gone") else "yellow" if look.state == "paused" else "default"
    )
    commands = next_commands(look, typed) if look.state not in ("paused", "starting") else []
    word = "Go on: " if look.state in ("stopped", "died") else "Next: "
    lines = [f"{word if at == 0 else ' ' * len(word)}{command}" for at, command in enumerate(commands)]
    return [Text(said, style=style, overflow="fold"), *(Text(line, overflow="fold") for line in lines)]


def _error(look: Look) -> tuple[str, str]:
    """Why a run failed, and what to try; errors of ours say both."""
    said, _, hint = one_line(look.summary.ending.get("error") or "no reason was given").partition(" Try: ")
    return said, hint

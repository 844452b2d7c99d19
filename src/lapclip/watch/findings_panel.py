"""What is wrong, and what happened besides learning."""

from __future__ import annotations

from datetime import datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lapclip.text import UNKNOWN, duration, one_line
from lapclip.watch.canvas import Paper, section
from lapclip.watch.run_view import Look

SEVERITIES = {"alarm": "bold red", "warning": "yellow", "note": "blue"}


def alarms(look: Look, paper: Paper, most: int, doctor: str) -> RenderableType | None:
    """What is wrong, in plain words, the worst first."""
    found = look.alarms
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
    return section({"alarm": "Alarm", "warning": "Warning"}.get(found[0].severity, "Note"), grid, paper, worst)


def happened(look: Look, paper: Paper, most: int = 3) -> RenderableType | None:
    """The latest fallbacks, pauses and resumes, the newest last."""
    # What the top of the screen says already is not said twice.
    told = look.state in ("failed", "paused", "stopped") and look.notices and look.notices[-1].type == look.state
    latest = (look.notices[:-1] if told else look.notices)[-most:]
    if not latest:
        return None
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for notice in latest:
        after = f"after step {notice.step:,}: " if notice.step else ""
        grid.add_row(clock(notice.time), Text(after + notice.text, style="yellow" if notice.bad else ""))
    return section("What happened", grid, paper)


def silence(look: Look) -> str:
    """A word on a run that has said nothing for long."""
    return f"no word for {duration(look.silent_seconds)}: asleep, or stuck" if look.silent_seconds else ""


def clock(seconds: float) -> str:
    """A moment as hours and minutes here."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%H:%M")
    except (OverflowError, OSError, ValueError):  # a clock that was set to nonsense
        return UNKNOWN

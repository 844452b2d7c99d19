"""What panels are drawn on, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lapclip.runs.curves import Curve
from lapclip.watch import sparklines as sparks

BOXED = 60
"""Columns below which a panel has no frame."""
LABEL, SHORT_LABEL = 12, 8
"""Columns of the words in front of figures."""


@dataclass(frozen=True)
class Paper:
    """What a panel is drawn on."""

    width: int
    tall: int = 2
    """Lines of a large curve."""
    plain: bool = False
    """Only the characters of ASCII."""
    colour: bool = True
    framed: bool = True

    @property
    def inside(self) -> int:
        return self.width - 4 if self.framed else self.width

    def narrower(self, width: int) -> Paper:
        return Paper(width, self.tall, self.plain, self.colour, self.framed)


def section(title: str, body: RenderableType, paper: Paper, style: str = "dim") -> RenderableType:
    """A titled part of the screen: framed where there is room."""
    if not paper.framed:
        line = "-" if paper.plain else "─"
        return Group(Text(f"{title} {line * max(0, paper.width - len(title) - 1)}", style="bold"), body)
    return Panel(
        body,
        title=Text(title, style="bold"),
        title_align="left",
        border_style=style,
        box=box.ASCII if paper.plain else box.ROUNDED,
        width=paper.width,
        padding=(0, 1),
    )


def rows_of(label: int = LABEL) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=label - 1, no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    return grid


def drawn_curve(points: Curve, width: int, tall: int, colour: str, paper: Paper) -> Text:
    lines = sparks.curve(points, max(4, width), 1 if paper.plain else tall, paper.plain)
    return Text("\n".join(lines), style=colour, no_wrap=True)


def fitting(room: int, text: str, more: str) -> str:
    """Both, or the first alone where there is no room for more."""
    return text + more if len(text + more) <= room else text

"""What a report is made of. Plain text throughout: page.py and markdown.py make it safe for where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A cell of a table with a tone, numbered from 1: cells of one tone belong together."""

    text: str
    tone: int


@dataclass(frozen=True)
class Table:
    """Rows of text. A folded one opens on a click."""

    columns: list[str]
    rows: list[list[str | Cell]]
    folded: str = ""
    """What a folded table is called."""


@dataclass(frozen=True)
class Sentences:
    """Sentences, one a line."""

    lines: list[str]


@dataclass(frozen=True)
class Plot:
    """A chart, what to look for in it, and the same as a table for those who cannot see it."""

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    explanation: str
    table: Table
    height: int = 320


@dataclass(frozen=True)
class ReportImage:
    """A small image, the text under it, and whether it is the right one, where that is the question."""

    path: Path
    text: str
    right: bool | None = None


@dataclass(frozen=True)
class Gallery:
    """Images in rows, each row with what it is about."""

    title: str
    explanation: str
    rows: list[tuple[str, list[ReportImage]]]


Block = Table | Sentences | Plot | Gallery


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Headline:
    """One of the few numbers at the top."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    subtitle: str
    headlines: list[Headline] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

"""What a report is made of, and the HTML page that it becomes: one file that needs nothing else, with styles, charts
and plotly.js inside. The parts are plain text; they are made safe for the page here, and for Markdown in `__init__.py`.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapclip.paths import read_bytes
from lapclip.text import to_json, without_controls
from lapclip.user_files import COMMENT
from lapclip.web.server import plotly_file


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

    content: Path | bytes
    """A JPEG or PNG: the file, or its bytes. Empty if there is none."""
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


STATIC = Path(__file__).parent / "static"
# Nothing may be fetched, whatever a caption says; what is in the file may run.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def html_page(
    title: str,
    subtitle: str,
    body: str,
    *,
    styles: Sequence[Path] = (),
    scripts: Sequence[Path] = (),
    data: Mapping[str, Any] | None = None,
    body_class: str = "",
) -> str:
    """A page that fetches nothing, with the style of reports.

    `body` is HTML, in which every foreign text has passed through `escaped`; title and subtitle are plain text. The
    files in `styles` and `scripts` are written into the page; `data` holds values that scripts read from the JSON
    element of that id.
    """
    style = "".join(path.read_text(encoding="utf-8") for path in (STATIC / "page.css", *styles))
    # "<" written as an escape: no text inside can end the script that holds it.
    encoded = {
        name: to_json(value, compact=True).replace("<", "\\u003c")
        for name, value in (data or {}).items()
    }
    values = "".join(
        f'<script type="application/json" id="{name}">{text}</script>'
        for name, text in encoded.items()
    )
    programs = "".join(
        f"<script>{_script(path.read_text(encoding='utf-8'))}</script>" for path in scripts
    )
    attribute = f' class="{body_class}"' if body_class else ""
    return (
        f'<!doctype html>\n{COMMENT}<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{style}</style></head><body{attribute}>"
        f"<header><h1>{escaped(title)}</h1><p>{escaped(subtitle)}</p></header><main>{body}</main>"
        "<footer><p>Made by lapclip. This page is one file and asks no network.</p></footer>"
        f"{values}{programs}</body></html>\n"
    )


def escaped(text: object) -> str:
    """Foreign text as HTML that shows it as it is, but for what would steer a terminal that it is copied into.
    A lone surrogate, which no file can hold, becomes "?"."""
    return html.escape(without_controls(str(text).encode("utf-8", "replace").decode("utf-8")))


def headlines(lines: Sequence[Headline]) -> str:
    """The few numbers at the top of a page."""
    cards = "".join(
        f"<div><dt>{escaped(line.name)}</dt><dd><strong>{escaped(line.value)}</strong>"
        f"<span>{escaped(line.detail)}</span></dd></div>"
        for line in lines
    )
    return f'<dl class="headlines">{cards}</dl>' if cards else ""


def to_html(report: Report) -> str:
    """A whole report."""
    plots = [
        block for section in report.sections for block in section.blocks if isinstance(block, Plot)
    ]
    names = {id(plot): f"plot-{at}" for at, plot in enumerate(plots, 1)}
    charts = {names[id(plot)]: {"data": plot.traces, "layout": plot.layout} for plot in plots}
    body = headlines(report.headlines) + "".join(
        f"<section><h2>{escaped(section.title)}</h2>"
        f"{''.join(_block(block, names) for block in section.blocks)}</section>"
        for section in report.sections
    )
    if not plots:
        return html_page(report.title, report.subtitle, body)
    scripts = (plotly_file(), STATIC / "charts.js")
    return html_page(report.title, report.subtitle, body, scripts=scripts, data={"charts": charts})


def _block(block: Block, names: dict[int, str]) -> str:
    match block:
        case Sentences(lines=[only]):
            return f"<p>{escaped(only)}</p>"
        case Sentences():
            return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in block.lines)}</ul>"
        case Table() if block.folded:
            return (
                f"<details><summary>{escaped(block.folded)}</summary>{table_html(block)}</details>"
            )
        case Table():
            return table_html(block)
        case Plot():
            name = names[id(block)]
            return (
                f'<figure><h3 id="{name}-title">{escaped(block.title)}</h3>'
                f'<div class="plot" id="{name}" role="img" style="height:{block.height}px" '
                f'aria-labelledby="{name}-title" aria-describedby="{name}-caption"></div>'
                f'<figcaption id="{name}-caption">{escaped(block.explanation)}</figcaption>'
                f"<details><summary>As a table</summary>{table_html(block.table)}</details></figure>"
            )
        case Gallery():
            rows = "".join(
                f"<li><p>{escaped(text)}</p><div>{''.join(_image(image) for image in images)}</div></li>"
                for text, images in block.rows
            )
            kind = (
                "gallery pairs" if all(len(images) <= 2 for _, images in block.rows) else "gallery"
            )
            return (
                f"<figure><h3>{escaped(block.title)}</h3><figcaption>{escaped(block.explanation)}</figcaption>"
                f'<ul class="{kind}">{rows}</ul></figure>'
            )


def _image(image: ReportImage) -> str:
    """An image inside the page, framed by whether it is right; one that cannot be read is a card with its text."""
    tone = {True: "right", False: "wrong", None: "plain"}[image.right]
    label = {True: "right: ", False: "wrong: ", None: ""}[image.right]
    try:
        content = image.content
        if isinstance(content, Path):
            content = read_bytes(content, own=True)
    except OSError:
        content = b""
    shown = '<span class="missing">no image</span>'
    if content:
        data = base64.b64encode(content).decode("ascii")
        kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
        shown = f'<img src="data:image/{kind};base64,{data}" alt="{escaped(image.text)}">'
    return f'<div class="image {tone}">{shown}<span>{label}{escaped(image.text)}</span></div>'


def table_html(table: Table) -> str:
    """A table alone, as it is in a page."""
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = "".join(
        f"<tr>{''.join(_cell(cell, at) for at, cell in enumerate(row))}</tr>" for row in table.rows
    )
    return f'<div class="table" tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div>'


def _cell(cell: str | Cell, at: int) -> str:
    if isinstance(cell, Cell):
        return f'<td class="tone tone-{cell.tone}">{escaped(cell.text)}</td>'
    if at == 0:  # names such as train.image_attention may break on a phone
        return f'<th scope="row">{escaped(cell).replace("_", "_<wbr>")}</th>'
    return f"<td>{escaped(cell)}</td>"


def _script(source: str) -> str:
    """A script that cannot be ended from inside."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")

"""A report as one HTML file that needs nothing else: styles, charts and plotly.js are inside."""

from __future__ import annotations

import base64
import html
import importlib.util
import json
from pathlib import Path

from lapclip.errors import RunError
from lapclip.report.document import Block, Cell, Gallery, Headline, Plot, Report, ReportImage, Sentences, Table

STATIC = Path(__file__).parent / "static"
# Nothing may be fetched, whatever a caption says; what is in the file may run.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def to_html(report: Report) -> str:
    """The whole page."""
    plots = [block for section in report.sections for block in section.blocks if isinstance(block, Plot)]
    names = {id(plot): f"plot-{at}" for at, plot in enumerate(plots, 1)}
    figures = {names[id(plot)]: {"data": plot.traces, "layout": plot.layout} for plot in plots}
    body = "".join(
        f"<section><h2>{_text(section.title)}</h2>{''.join(_block(block, names) for block in section.blocks)}</section>"
        for section in report.sections
    )
    scripts = ""
    if plots:
        # "<" written as an escape: no text inside can end the script that holds it.
        data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        scripts = (
            f'<script type="application/json" id="figures">{data}</script>'
            f"<script>{_script(plotly_source())}</script><script>{_script(_static('page.js'))}</script>"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(report.title)}</title><style>{_static('page.css')}</style></head><body>"
        f"<header><h1>{_text(report.title)}</h1><p>{_text(report.subtitle)}</p></header>"
        f"<main>{_headlines(report.headlines)}{body}</main>"
        "<footer><p>Made by lapclip. This page is one file and asks no network.</p></footer>"
        f"{scripts}</body></html>\n"
    )


def plotly_source() -> str:
    """plotly.js, as the plotly package carries it. The package itself is not imported: that takes a second."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise RunError("The package plotly is not installed; it draws the charts.", hint="pip install plotly")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _block(block: Block, names: dict[int, str]) -> str:
    match block:
        case Sentences(lines=[only]):
            return f"<p>{_text(only)}</p>"
        case Sentences():
            return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in block.lines)}</ul>"
        case Table() if block.folded:
            return f"<details><summary>{_text(block.folded)}</summary>{_table(block)}</details>"
        case Table():
            return _table(block)
        case Plot():
            name = names[id(block)]
            return (
                f'<figure><h3 id="{name}-title">{_text(block.title)}</h3>'
                f'<div class="plot" id="{name}" role="img" style="height:{block.height}px" '
                f'aria-labelledby="{name}-title" aria-describedby="{name}-words"></div>'
                f'<figcaption id="{name}-words">{_text(block.look_for)}</figcaption>'
                f"<details><summary>In figures</summary>{_table(block.figures)}</details></figure>"
            )
        case Gallery():
            rows = "".join(
                f"<li><p>{_text(words)}</p><div>{''.join(_image(image) for image in images)}</div></li>"
                for words, images in block.rows
            )
            kind = "gallery pairs" if all(len(images) <= 2 for _, images in block.rows) else "gallery"
            return (
                f"<figure><h3>{_text(block.title)}</h3><figcaption>{_text(block.look_for)}</figcaption>"
                f'<ul class="{kind}">{rows}</ul></figure>'
            )


def _image(image: ReportImage) -> str:
    """An image inside the page, framed by whether it is right; one that cannot be read is a card with its words."""
    tone = {True: "right", False: "wrong", None: "plain"}[image.right]
    said = {True: "right: ", False: "wrong: ", None: ""}[image.right]
    try:
        data = base64.b64encode(image.path.read_bytes()).decode("ascii")
        shown = f'<img src="data:image/jpeg;base64,{data}" alt="{_text(image.words)}">'
    except OSError:
        shown = '<span class="missing">no image</span>'
    return f'<div class="image {tone}">{shown}<span>{said}{_text(image.words)}</span></div>'


def _headlines(lines: list[Headline]) -> str:
    cards = "".join(
        f"<div><dt>{_text(line.name)}</dt><dd><strong>{_text(line.value)}</strong>"
        f"<span>{_text(line.detail)}</span></dd></div>"
        for line in lines
    )
    return f'<dl class="headlines">{cards}</dl>' if cards else ""


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = "".join(f"<tr>{''.join(_cell(cell, at) for at, cell in enumerate(row))}</tr>" for row in table.rows)
    return f'<div class="table" tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div>'


def _cell(cell: str | Cell, at: int) -> str:
    if isinstance(cell, Cell):
        return f'<td class="tone tone-{cell.tone}">{_text(cell.text)}</td>'
    if at == 0:  # names such as train.image_attention may break on a phone
        return f'<th scope="row">{_text(cell).replace("_", "_<wbr>")}</th>'
    return f"<td>{_text(cell)}</td>"


def _text(text: object) -> str:
    return html.escape(str(text))


def _script(source: str) -> str:
    """A script that cannot be ended from inside."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")

"""A contact sheet as one HTML file that needs nothing else. Captions and names are text, never markup."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

from lapclip.data_check.describe import Sheet, Shown
from lapclip.report.page import POLICY
from lapclip.report.page import STATIC as REPORT

STATIC = Path(__file__).parent / "static"
LONGEST = 40
"""Captions of more words share the last bar."""


def to_page(sheet: Sheet) -> str:
    """The whole page."""
    css = (REPORT / "page.css").read_text(encoding="utf-8") + (STATIC / "sheet.css").read_text(encoding="utf-8")
    script = (STATIC / "sheet.js").read_text(encoding="utf-8")
    choices = "".join(f"<option>{_text(split)}</option>" for split in sheet.splits)
    words = "".join(f"<li><span>{_text(word)}</span> {count:,}</li>" for word, count in sheet.words)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(sheet.title)}</title><style>{css}</style></head><body class='sheet'>"
        f"<header><h1>{_text(sheet.title)}</h1><p>{_text(sheet.how)}</p></header><main>"
        f'<dl class="headlines">{_headlines(sheet)}</dl>'
        '<section><h2>Images</h2><form class="find" role="search">'
        '<label>Find <input type="search" id="wanted" placeholder="a word in a caption or name"></label>'
        f'<label>Split <select id="split"><option value="">all</option>{choices}</select></label>'
        f'<output id="count">{len(sheet.shown):,} shown</output></form>'
        f'<div class="images">{"".join(_figure(shown) for shown in sheet.shown)}</div></section>'
        f"<section><h2>Words in a caption</h2>{_histogram(sheet.lengths)}</section>"
        f'<section><h2>Said most</h2><ul class="words">{words}</ul></section></main>'
        "<footer><p>Made by lapclip. This page is one file and asks no network.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _headlines(sheet: Sheet) -> str:
    splits = ", ".join(f"{split} {count:,}" for split, count in sheet.splits.items())
    each = sheet.captions / max(1, sheet.images)
    cards = [
        ("Pictures", f"{sheet.images:,}", splits),
        ("Captions", f"{sheet.captions:,}", f"{each:.1f} an image"),
        ("Shown here", f"{len(sheet.shown):,}", "drawn at random, the same ones each time"),
    ]
    return "".join(
        f"<div><dt>{name}</dt><dd><strong>{_text(value)}</strong><span>{_text(detail)}</span></dd></div>"
        for name, value, detail in cards
    )


def _figure(shown: Shown) -> str:
    file = io.BytesIO()
    shown.image.save(file, "JPEG", quality=80)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    captions = "".join(f"<li>{_text(caption)}</li>" for caption in shown.captions)
    said = _text(shown.captions[0] if shown.captions else shown.name)
    return (
        f'<figure data-split="{_text(shown.split)}"><img src="data:image/jpeg;base64,{data}" alt="{said}" '
        f'width="{shown.image.width}" height="{shown.image.height}" loading="lazy">'
        f"<figcaption><small><b>{_text(shown.split)}</b> {_text(shown.name)}</small><ul>{captions}</ul></figcaption>"
        "</figure>"
    )


def _histogram(lengths: dict[int, int]) -> str:
    """Bars by number of words, with the figures in each bar's title and in a table for those who cannot see it."""
    if not lengths:
        return "<p>There are no captions.</p>"
    bars = {words: count for words, count in lengths.items() if words < LONGEST}
    more = sum(count for words, count in lengths.items() if words >= LONGEST)
    named = [(str(words), bars.get(words, 0)) for words in range(min(*lengths, LONGEST), max(bars, default=0) + 1)]
    named += [(f"{LONGEST}+", more)] * bool(more)
    most = max(count for _, count in named)
    columns = "".join(
        f'<div title="{count:,} captions of {words} words">'
        f'<i style="height:calc((100% - 1.1rem) * {count / most:.4f})"></i>'
        f"<span>{words}</span></div>"
        for words, count in named
    )
    rows = "".join(f'<tr><th scope="row">{words}</th><td>{count:,}</td></tr>' for words, count in named)
    head = '<thead><tr><th scope="col">words</th><th scope="col">captions</th></tr></thead>'
    return (
        f'<div class="bars" aria-hidden="true">{columns}</div><details><summary>In figures</summary>'
        f'<div class="table" tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div></details>'
    )


def _text(text: object) -> str:
    # A lone surrogate cannot be written as UTF-8.
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))

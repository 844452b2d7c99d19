"""A contact sheet: some images of a data set with their captions, as one image or as one page that needs nothing else.

Captions and names come from anywhere: on the page they are text, never markup.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from lapclip.report.document import STATIC, Headline, escaped, headlines, html_page

CELL, BOX, GAP, MARGIN = 260, 195, 24, 32
"""Width of a cell, height of the image in it, space between cells and around the sheet."""
COLUMNS, MOST = 6, 120
LINE, LINES = 17, 8
MOST_LETTERS = CELL // 2 * (LINES + 1)
"""Letters of a caption that are measured. More than fit: none is as narrow as two pixels."""
PAPER, INK, MUTED, CARD = "#ffffff", "#1b1f24", "#5b6470", "#f5f6f8"
FONTS = ("DejaVuSans.ttf", "Arial Unicode.ttf", "segoeui.ttf", "Arial.ttf", "Helvetica.ttc")
"""Tried in turn; else Pillow's own, which knows Latin letters only."""
LONGEST = 40
"""Captions of more words share the last bar."""


@dataclass(frozen=True)
class Shown:
    """An image on the sheet."""

    name: str
    split: str
    captions: Sequence[str]
    image: Image.Image


@dataclass(frozen=True)
class Sheet:
    """What a contact sheet shows."""

    title: str
    how: str
    images: int
    captions: int
    splits: dict[str, int]
    shown: list[Shown]
    lengths: dict[int, int]
    """How many captions have so many words."""
    words: list[tuple[str, int]]


def to_image(sheet: Sheet) -> Image.Image:
    """The whole sheet as one image."""
    cells = [(shown, _lines(shown)) for shown in sheet.shown[:MOST]]
    columns = min(COLUMNS, len(cells))
    rows = [cells[at : at + columns] for at in range(0, len(cells), columns)]
    heights = [BOX + 10 + LINE * max(len(lines) for _, lines in row) + GAP for row in rows]
    width = max(2 * MARGIN + columns * CELL + (columns - 1) * GAP, 600)
    image = Image.new("RGB", (width, MARGIN + 84 + sum(heights) + MARGIN - GAP), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN - 8), _cut(sheet.title, 26, width - 2 * MARGIN), INK, _font(26))
    splits = ", ".join(f"{split} {count:,}" for split, count in sheet.splits.items())
    facts = f"{sheet.images:,} images, {sheet.captions:,} captions; {splits}; {len(cells)} of them shown"
    pen.text((MARGIN, MARGIN + 32), _cut(facts, 15, width - 2 * MARGIN), MUTED, _font(15))
    top = MARGIN + 84
    for row, height in zip(rows, heights, strict=True):
        for column, (shown, lines) in enumerate(row):
            _cell(image, pen, shown, lines, MARGIN + column * (CELL + GAP), top)
        top += height
    return image


def _cell(image: Image.Image, pen: ImageDraw.ImageDraw, shown: Shown, lines: list[str], left: int, top: int) -> None:
    pen.rectangle((left, top, left + CELL - 1, top + BOX - 1), fill=CARD)
    scale = min(CELL / shown.image.width, BOX / shown.image.height)
    size = (max(1, round(shown.image.width * scale)), max(1, round(shown.image.height * scale)))
    small = shown.image.resize(size, Image.Resampling.BICUBIC)
    image.paste(small, (left + (CELL - small.width) // 2, top + (BOX - small.height) // 2))
    for at, line in enumerate(lines):
        pen.text((left, top + BOX + 8 + at * LINE), line, MUTED if at == 0 else INK, _font(11 if at == 0 else 13))


def _lines(shown: Shown) -> list[str]:
    """The name and as much of the captions as fits under an image."""
    lines = [_cut(f"{shown.split}  {shown.name}", 11, CELL)]
    for caption in shown.captions:
        lines += _wrapped("\N{MIDDLE DOT} " + " ".join(caption[:MOST_LETTERS].split()))
        if len(lines) > LINES:
            break
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], _cut(f"{lines[LINES - 1]} ...", 13, CELL)]
    return lines


def _wrapped(text: str) -> list[str]:
    """Lines that fit a cell; a word that does not is broken, as in scripts without spaces."""
    lines, line = [], ""
    for word in text.split():
        while word:
            tried = f"{line} {word}".strip()
            if _width(tried, 13) <= CELL:
                line, word = tried, ""
            elif line:
                lines.append(line)
                line = ""
            else:
                most = min(len(word) - 1, CELL // 2)
                fitting = next((n for n in range(most, 0, -1) if _width(word[:n], 13) <= CELL), 1)
                lines.append(word[:fitting])
                word = word[fitting:]
            if len(lines) > LINES:
                return lines
    return [*lines, line] if line else lines


def _cut(text: str, size: int, room: int) -> str:
    if len(text) <= room and _width(text, size) <= room:
        return text
    text = text[:room]
    while text and _width(f"{text}...", size) > room:
        text = text[:-1]
    return f"{text}..."


def _width(text: str, size: int) -> float:
    return _font(size).getlength(text)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    for name in FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def to_page(sheet: Sheet) -> str:
    """The whole sheet as one HTML file that needs nothing else."""
    choices = "".join(f"<option>{escaped(split)}</option>" for split in sheet.splits)
    words = "".join(f"<li><span>{escaped(word)}</span> {count:,}</li>" for word, count in sheet.words)
    splits = ", ".join(f"{split} {count:,}" for split, count in sheet.splits.items())
    facts = [
        Headline("Images", f"{sheet.images:,}", splits),
        Headline("Captions", f"{sheet.captions:,}", f"{sheet.captions / max(1, sheet.images):.1f} an image"),
        Headline("Shown here", f"{len(sheet.shown):,}", "drawn at random, the same ones each time"),
    ]
    body = (
        f"{headlines(facts)}"
        '<section><h2>Images</h2><form class="find" role="search">'
        '<label>Find <input type="search" id="wanted" placeholder="a word in a caption or name"></label>'
        f'<label>Split <select id="split"><option value="">all</option>{choices}</select></label>'
        f'<output id="count">{len(sheet.shown):,} shown</output></form>'
        f'<div class="images">{"".join(_figure(shown) for shown in sheet.shown)}</div></section>'
        f"<section><h2>Words in a caption</h2>{_histogram(sheet.lengths)}</section>"
        f'<section><h2>Most frequent words</h2><ul class="words">{words}</ul></section>'
    )
    styles, scripts = [STATIC / "sheet.css"], [STATIC / "sheet.js"]
    return html_page(sheet.title, sheet.how, body, styles=styles, scripts=scripts, body_class="sheet")


def _figure(shown: Shown) -> str:
    file = io.BytesIO()
    shown.image.save(file, "JPEG", quality=80)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    captions = "".join(f"<li>{escaped(caption)}</li>" for caption in shown.captions)
    alternative = escaped(shown.captions[0] if shown.captions else shown.name)
    return (
        f'<figure data-split="{escaped(shown.split)}"><img src="data:image/jpeg;base64,{data}" alt="{alternative}" '
        f'width="{shown.image.width}" height="{shown.image.height}" loading="lazy">'
        f"<figcaption><small><b>{escaped(shown.split)}</b> {escaped(shown.name)}</small>"
        f"<ul>{captions}</ul></figcaption></figure>"
    )


def _histogram(lengths: dict[int, int]) -> str:
    """Bars by number of words, with the numbers in each bar's title and in a table for those who cannot see it."""
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
        f'<div class="bars" aria-hidden="true">{columns}</div><details><summary>In numbers</summary>'
        f'<div class="table" tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div></details>'
    )

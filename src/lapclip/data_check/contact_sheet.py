"""A contact sheet as one image."""

from __future__ import annotations

from functools import cache

from PIL import Image, ImageDraw, ImageFont

from lapclip.data_check.describe import Sheet, Shown

CELL, BOX, GAP, MARGIN = 260, 195, 24, 32
"""Width of a cell, height of the image in it, space between cells and around the sheet."""
COLUMNS, MOST = 6, 120
LINE, LINES = 17, 8
MOST_LETTERS = CELL // 2 * (LINES + 1)
"""Letters of a caption that are looked at. More than fit: none is as narrow as two pixels."""
PAPER, INK, MUTED, CARD = "#ffffff", "#1b1f24", "#5b6470", "#f5f6f8"
FONTS = ("DejaVuSans.ttf", "Arial Unicode.ttf", "segoeui.ttf", "Arial.ttf", "Helvetica.ttc")
"""Tried in turn; else Pillow's own, which knows Latin letters only."""


def to_image(sheet: Sheet) -> Image.Image:
    """The whole sheet."""
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

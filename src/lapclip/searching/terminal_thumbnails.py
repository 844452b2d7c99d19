"""Small images in a terminal that can show them, by one of three protocols. No torch.

kitty   https://sw.kovidgoyal.net/kitty/graphics-protocol/
iterm   https://iterm2.com/documentation-images.html
sixel   https://vt100.net/docs/vt3xx-gp/chapter14.html
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from lapclip.data.decode import decode
from lapclip.errors import DataError
from lapclip.paths import read_bytes

SIDE = 160
"""Pixels of the longer side."""
ROWS = 6
"""Lines of text that a thumbnail takes."""
CHUNK = 4096
"""Bytes that kitty takes at once."""
COLOURS = 64


def protocol(environment: Mapping[str, str] = os.environ) -> str | None:
    """What the terminal understands, by what it says of itself; None where it says nothing. Asking it would need an
    answer to be read from the keyboard."""
    terminal, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or terminal.startswith(("screen", "tmux", "dumb")):
        return None  # they pass on text alone
    if (
        "KITTY_WINDOW_ID" in environment
        or terminal in ("xterm-kitty", "xterm-ghostty")
        or program == "ghostty"
    ):
        return "kitty"
    if program in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    if terminal.startswith(("foot", "mlterm", "yaft")) or "sixel" in terminal:
        return "sixel"
    return None


def thumbnail(path: Path, how: str) -> str | None:
    """An image as text that a terminal draws; None where it cannot be read any more."""
    try:
        image = decode(read_bytes(path), SIDE).image
    except (OSError, DataError):
        return None
    image.thumbnail((SIDE, SIDE))
    return {"kitty": _kitty, "iterm": _iterm, "sixel": _sixel}[how](image)


def _kitty(image: Image.Image) -> str:
    data = base64.b64encode(_bytes(image, "PNG")).decode()
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    drawn = []
    for at, chunk in enumerate(chunks):
        first = f"a=T,f=100,r={ROWS},q=2," if at == 0 else ""
        drawn.append(f"\x1b_G{first}m={int(at + 1 < len(chunks))};{chunk}\x1b\\")
    return "".join(drawn)


def _iterm(image: Image.Image) -> str:
    data = _bytes(image, "JPEG")
    encoded = base64.b64encode(data).decode()
    return f"\x1b]1337;File=inline=1;size={len(data)};height={ROWS};preserveAspectRatio=1:{encoded}\x07"


def _sixel(image: Image.Image) -> str:
    """Bands of six rows; in each band one pass a colour, a letter a column."""
    few = image.quantize(COLOURS)
    palette = np.array(few.getpalette() or [0, 0, 0]).reshape(-1, 3)
    pixels_HW = np.asarray(few)
    drawn = [f'\x1bPq"1;1;{few.width};{few.height}']
    for colour in np.unique(pixels_HW):
        red, green, blue = (int(value) * 100 // 255 for value in palette[colour])
        drawn.append(f"#{colour};2;{red};{green};{blue}")
    for top in range(0, len(pixels_HW), 6):
        band = pixels_HW[top : top + 6]
        weights = (1 << np.arange(len(band)))[:, None]
        for colour in np.unique(band):
            letters = 63 + ((band == colour) * weights).sum(axis=0)
            drawn.append(f"#{colour}{bytes(letters.astype(np.uint8)).decode('ascii')}$")
        drawn.append("-")
    return "".join(drawn) + "\x1b\\"


def _bytes(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()

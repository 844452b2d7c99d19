from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapclip.searching.terminal_thumbnails import SIDE, protocol, thumbnail
from tests.searching.made import draw


@pytest.mark.parametrize(
    ("environment", "how"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "tmux-256color", "TMUX": "x", "KITTY_WINDOW_ID": "1"}, None),
        ({}, None),
    ],
)
def test_terminals_by_what_they_say_of_themselves(
    environment: dict[str, str], how: str | None
) -> None:
    assert protocol(environment) == how


def test_kitty_gets_a_png_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)).save(
        path
    )
    drawn = thumbnail(path, "kitty")
    assert drawn is not None
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", drawn)
    assert "".join(f"\x1b_G{keys};{data}\x1b\\" for keys, data in pieces) == drawn
    assert len(pieces) > 1
    assert pieces[0][0].startswith("a=T,f=100")
    assert [keys[-3:] for keys, _ in pieces] == ["m=1"] * (len(pieces) - 1) + ["m=0"]
    assert all(len(data) <= 4096 for _, data in pieces)
    image = Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in pieces))))
    assert max(image.size) == SIDE


def test_iterm_gets_a_file(tmp_path: Path) -> None:
    drawn = thumbnail(draw(tmp_path / "a.png", 1, side=400), "iterm")
    assert drawn is not None
    found = re.fullmatch(r"\x1b\]1337;File=inline=1;size=(\d+);[^:]*:([A-Za-z0-9+/=]+)\x07", drawn)
    assert found
    data = base64.b64decode(found[2])
    assert len(data) == int(found[1])
    assert Image.open(io.BytesIO(data)).size == (SIDE, SIDE)


def test_sixels_are_the_image(tmp_path: Path) -> None:
    """Drawn again from the letters as a terminal would."""
    path = draw(tmp_path / "a.png", 1, side=SIDE)
    drawn = thumbnail(path, "sixel")
    assert drawn is not None
    body = drawn.removeprefix(f'\x1bPq"1;1;{SIDE};{SIDE}').removesuffix("\x1b\\")
    palette = {
        int(c): (int(r), int(g), int(b))
        for c, r, g, b in re.findall(r"#(\d+);2;(\d+);(\d+);(\d+)", body)
    }
    body = re.sub(r"#\d+;2;\d+;\d+;\d+", "", body)
    picture = np.zeros((SIDE + 6, SIDE, 3))
    for band, text in enumerate(body.split("-")):
        for colour, letters in re.findall(r"#(\d+)([?-~]+)\$", text):
            for column, letter in enumerate(letters):
                for bit in range(6):
                    if (ord(letter) - 63) >> bit & 1:
                        picture[band * 6 + bit, column] = palette[int(colour)]
    true = np.asarray(Image.open(path)) / 255 * 100
    assert np.abs(picture[:SIDE] - true).mean() < 3


def test_an_image_that_has_gone(tmp_path: Path) -> None:
    assert thumbnail(tmp_path / "none.png", "kitty") is None

"""Draws docs/scenes.png: what the built-in images look like."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from lapclip.data.scenes import split_scenes
from lapclip.data.scenes.drawing import draw

COLUMNS, ROWS, SIDE, GAP = 8, 3, 96, 4


def main() -> None:
    scenes = split_scenes(COLUMNS * ROWS, seed=1)["train"]
    sheet = Image.new("RGB", (COLUMNS * (SIDE + GAP) - GAP, ROWS * (SIDE + GAP) - GAP), "white")
    for index, scene in enumerate(scenes):
        corner = (index % COLUMNS * (SIDE + GAP), index // COLUMNS * (SIDE + GAP))
        sheet.paste(Image.fromarray(draw(scene, SIDE, index)), corner)
    sheet.save(Path(__file__).parent / "scenes.png", optimize=True)


if __name__ == "__main__":
    main()

"""Draws the images of the built-in procedural data set.

A scene names what a caption may say: thing, colour, count, position and setting. Everything else (jitter, size,
clouds, hills, noise) comes from the seed. All lengths are fractions of the image, so a seed looks alike at any size.
"""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from lapclip.data.scenes import Scene
from lapclip.data.scenes.things import BLACK, COLOURS, THINGS, WHITE, Colour, Pen, Point, mix


class Setting(NamedTuple):
    """How the light of a setting colours the sky, and by how much it tints the backdrop."""

    sky_top: Colour
    sky_low: Colour
    tint: Colour
    amount: float


SETTINGS = {
    "noon": Setting((84, 164, 238), (206, 232, 250), (255, 255, 235), 0.1),
    "sunset": Setting((196, 92, 130), (255, 184, 110), (140, 70, 70), 0.5),
    "night": Setting((10, 14, 48), (40, 50, 104), (20, 24, 58), 0.62),
    "snow": Setting((166, 176, 190), (206, 212, 220), (244, 247, 252), 0.86),
}
GROUNDS = {
    "nature": (150, 172, 120),
    "animals": (164, 184, 118),
    "urban": (150, 150, 152),
    "food": (206, 190, 170),
}
POSITIONS = {"left": 0.24, "middle": 0.5, "right": 0.76}
# For each count: the height of a thing, and where each stands as (x from the middle of the group, y).
GROUPS: dict[int, tuple[float, list[Point]]] = {
    1: (0.44, [(0, 0.87)]),
    2: (0.3, [(-0.12, 0.65), (0.12, 0.94)]),
    3: (0.265, [(0, 0.64), (-0.16, 0.94), (0.16, 0.94)]),
}
NOISE_SIDE = 256


def draw(scene: Scene, size: int, seed: int) -> np.ndarray:
    """Return the image of a scene as uint8 RGB of shape (size, size, 3), the same for the same arguments."""
    dice = Dice(seed)
    zoom = 4 if size <= 96 else 3
    canvas = Canvas(size * zoom, SETTINGS[scene.setting])
    horizon = dice.between(0.54, 0.6)
    _sky(canvas, dice, scene.setting, horizon)
    BACKDROPS[scene.category](canvas, dice, horizon, GROUNDS[scene.category])
    if scene.setting == "snow":
        _snowflakes(canvas, dice)
    _group(canvas, dice, scene)
    return _noisy(np.asarray(canvas.image.reduce(zoom)), dice)


class Dice:
    """The only source of chance: built on Random.random(), whose values are the same on every platform."""

    def __init__(self, seed: int) -> None:
        self.roll = random.Random(seed).random

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.roll()

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from low up to, but not including, high."""
        return low + int((high - low) * self.roll())


class Canvas:
    """An image addressed in fractions of its side, that tints backdrop colours with the light of the setting."""

    def __init__(self, side: int, setting: Setting) -> None:
        self.side = side
        self.setting = setting
        self.image = Image.new("RGB", (side, side))
        self.ink = ImageDraw.Draw(self.image)

    def lit(self, colour: Colour, distance: float = 0) -> Colour:
        """Return a colour as the light of the setting shows it; distant colours fade into the sky."""
        return mix(
            mix(colour, self.setting.tint, self.setting.amount), self.setting.sky_low, distance
        )

    def box(self, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
        corners = [round(value * self.side) for value in (left, top, right, bottom)]
        if corners[2] > corners[0] and corners[3] > corners[1]:
            self.ink.rectangle([corners[0], corners[1], corners[2] - 1, corners[3] - 1], fill)

    def polygon(self, points: list[Point], fill: Colour) -> None:
        self.ink.polygon([(round(x * self.side), round(y * self.side)) for x, y in points], fill)

    def ellipse(self, x: float, y: float, across: float, down: float, fill: Colour) -> None:
        bounds = (x - across, y - down, x + across, y + down)
        self.ink.ellipse([round(value * self.side) for value in bounds], fill)

    def fade(self, top: float, bottom: float, first: Colour, last: Colour) -> None:
        """Fill a full-width band with a vertical blend of two colours."""
        bands = 24
        for band in range(bands):
            start, end = (top + (bottom - top) * (band + edge) / bands for edge in (0, 1))
            self.box(0, start, 1, end, mix(first, last, band / (bands - 1)))


def _sky(canvas: Canvas, dice: Dice, setting: str, horizon: float) -> None:
    top, low, *_ = canvas.setting
    canvas.fade(0, horizon + 0.1, top, low)
    x, y = dice.between(0.12, 0.88), dice.between(0.1, 0.17)
    if setting == "noon":
        canvas.ellipse(x, y, 0.1, 0.1, (196, 224, 236))
        canvas.ellipse(x, y, 0.07, 0.07, (255, 246, 176))
    elif setting == "sunset":
        y += horizon - 0.24
        canvas.ellipse(x, y, 0.19, 0.19, (252, 170, 112))
        canvas.ellipse(x, y, 0.13, 0.13, (255, 214, 130))
    elif setting == "night":
        for _ in range(dice.whole(18, 28)):
            star = dice.between(0.005, 0.01)
            canvas.ellipse(
                dice.roll(), dice.between(0, horizon - 0.04), star, star, (226, 230, 250)
            )
        canvas.ellipse(x, y, 0.075, 0.075, (240, 238, 214))
        canvas.ellipse(x + 0.035, y - 0.02, 0.06, 0.06, mix(top, low, 0.15))
    if setting in ("noon", "sunset"):
        for _ in range(dice.whole(1, 4)):
            _cloud(canvas, dice, mix(low, WHITE, 0.75 if setting == "noon" else 0.2))


def _cloud(canvas: Canvas, dice: Dice, colour: Colour) -> None:
    x, y, width = dice.roll(), dice.between(0.08, 0.36), dice.between(0.07, 0.12)
    canvas.ellipse(x, y, width, width * 0.28, colour)
    canvas.ellipse(x - width * 0.3, y - width * 0.2, width * 0.45, width * 0.35, colour)
    canvas.ellipse(x + width * 0.3, y - width * 0.15, width * 0.4, width * 0.28, colour)


def _snowflakes(canvas: Canvas, dice: Dice) -> None:
    for _ in range(dice.whole(40, 60)):
        flake = dice.between(0.007, 0.015)
        canvas.ellipse(dice.roll(), dice.between(0, 0.7), flake, flake, WHITE)


def _ground(canvas: Canvas, horizon: float, colour: Colour) -> None:
    near = mix(canvas.lit(colour), BLACK, 0.08)
    canvas.fade(horizon, 1, mix(canvas.lit(colour), canvas.setting.sky_low, 0.2), near)


def _hills(canvas: Canvas, dice: Dice, horizon: float, ground: Colour) -> None:
    for distance, height in ((0.5, 0.16), (0.3, 0.08)):
        for _ in range(3):
            hill = canvas.lit(mix(ground, (96, 120, 110), 0.5), distance)
            canvas.ellipse(
                dice.roll(),
                horizon + 0.02,
                dice.between(0.2, 0.4),
                height * dice.between(0.5, 1),
                hill,
            )
    _ground(canvas, horizon, ground)
    for _ in range(2):
        slope = canvas.lit(mix(ground, BLACK, 0.07))
        canvas.ellipse(
            dice.roll(),
            dice.between(0.75, 1.05),
            dice.between(0.3, 0.6),
            dice.between(0.04, 0.1),
            slope,
        )


def _meadow(canvas: Canvas, dice: Dice, horizon: float, ground: Colour) -> None:
    _ground(canvas, horizon, ground)
    wood = canvas.lit((168, 150, 128), 0.15)
    top = horizon - 0.09
    for rail in (top + 0.025, top + 0.065):
        canvas.box(0, rail, 1, rail + 0.016, wood)
    start, gap = dice.between(-0.1, 0), dice.between(0.12, 0.16)
    for post in range(9):
        x = start + post * gap
        canvas.polygon([(x, horizon + 0.02), (x, top), (x + 0.015, top - 0.02), (x + 0.03, top),
                        (x + 0.03, horizon + 0.02)], wood)  # fmt: skip
    blade = mix(canvas.lit(ground), (60, 84, 60), 0.3)
    for _ in range(14):
        x, y = dice.roll(), dice.between(horizon + 0.06, 1)
        for tip in (-0.02, 0, 0.02):
            canvas.polygon([(x - 0.006, y), (x + tip, y - 0.035), (x + 0.006, y)], blade)


def _street(canvas: Canvas, dice: Dice, horizon: float, ground: Colour) -> None:
    x = dice.between(-0.1, 0)
    while x < 1:
        width, top = dice.between(0.09, 0.17), horizon - dice.between(0.08, 0.28)
        block = canvas.lit(mix((128, 134, 150), (158, 150, 150), dice.roll()), 0.35)
        canvas.box(x, top, x + width, horizon, block)
        pane = mix(block, (255, 236, 170) if canvas.setting is SETTINGS["night"] else WHITE, 0.35)
        for row in range(int((horizon - top - 0.02) / 0.045)):
            for column in (0.2, 0.6):
                left, up = x + width * column, top + 0.02 + row * 0.045
                canvas.box(left, up, left + width * 0.22, up + 0.022, pane)
        x += width + dice.between(0, 0.02)
    _ground(canvas, horizon, ground)
    canvas.box(0, horizon, 1, horizon + 0.05, canvas.lit((184, 182, 178)))
    canvas.box(0, horizon + 0.05, 1, horizon + 0.06, canvas.lit((110, 110, 114)))
    start = dice.between(-0.2, 0)
    for dash in range(6):
        left = start + dash * 0.22
        canvas.box(left, 0.79, left + 0.12, 0.805, canvas.lit((214, 212, 204)))


def _table(canvas: Canvas, dice: Dice, horizon: float, ground: Colour) -> None:
    canvas.box(0, horizon - 0.03, 1, horizon, canvas.lit((150, 164, 140), 0.4))
    _ground(canvas, horizon, ground)
    cloth, shift = mix(canvas.lit(ground), canvas.lit((140, 128, 124)), 0.4), dice.between(0, 0.2)
    if canvas.setting is SETTINGS["snow"]:
        cloth = mix(cloth, BLACK, 0.08)
    rows = [horizon + (1 - horizon) * depth for depth in (0.06, 0.2, 0.38, 0.64, 1)]
    for row, (top, bottom) in enumerate(pairwise(rows)):
        for column in range(-7 + row % 2, 8, 2):
            left, right = shift + column * 0.2, shift + (column + 1) * 0.2
            # The columns draw together towards the far edge of the cloth.
            far, near = (0.5 + 0.5 * (edge - horizon) / (1 - horizon) for edge in (top, bottom))
            canvas.polygon([(0.5 + left * far, top), (0.5 + right * far, top),
                            (0.5 + right * near, bottom), (0.5 + left * near, bottom)], cloth)  # fmt: skip
    canvas.box(0, horizon, 1, horizon + 0.018, canvas.lit((150, 118, 92)))


BACKDROPS: dict[str, Callable[[Canvas, Dice, float, Colour], None]] = {
    "nature": _hills,
    "animals": _meadow,
    "urban": _street,
    "food": _table,
}


def _group(canvas: Canvas, dice: Dice, scene: Scene) -> None:
    height, spots = GROUPS[scene.count]
    growth = dice.between(0.87, 1.13) if scene.count == 1 else dice.between(0.88, 1.08)
    flip = growth if dice.roll() < 0.5 else -growth
    if dice.roll() < 0.5:
        rows = [y for _, y in spots]
        spots = [(x, min(rows) + max(rows) - y) for x, y in spots]
    half = growth * (height * 0.54 + max(abs(x) for x, _ in spots))
    middle = min(max(POSITIONS[scene.position] + dice.between(-0.03, 0.03), half), 1 - half)
    body = _shifted(COLOURS[scene.colour], dice)
    shadow = mix(canvas.lit(GROUNDS[scene.category]), BLACK, 0.35)
    outline_width = max(1, round(canvas.side * 0.011))
    # From back to front, so that where things touch the nearer one covers the other.
    for offset, base in sorted(spots, key=lambda spot: spot[1]):
        tall = height * growth * dice.between(0.97, 1.03)
        x, y = middle + offset * flip, base + dice.between(-0.015, 0.015)
        canvas.ellipse(x, y, tall * 0.42, tall * 0.07, shadow)
        foot, mirrored, lean = (
            (x * canvas.side, y * canvas.side),
            dice.roll() < 0.5,
            dice.between(-0.06, 0.06),
        )
        pen = Pen(canvas.ink, foot, tall * canvas.side, outline_width, body, mirrored, lean)
        THINGS[scene.thing](pen)
        pen.ink()


def _shifted(colour: Colour, dice: Dice) -> Colour:
    """Vary a colour a little, never so far that it would take another name."""
    light = dice.between(0.93, 1.03)
    red, green, blue = (
        min(255, max(0, round(part * light + dice.between(-7, 7)))) for part in colour
    )
    return red, green, blue


def _noisy(image: np.ndarray, dice: Dice) -> np.ndarray:
    top, left = dice.whole(0, NOISE_SIDE), dice.whole(0, NOISE_SIDE)
    tile = _noise_tile()
    rows, columns = (np.arange(first, first + len(image)) % len(tile) for first in (top, left))
    noise = tile[rows[:, None], columns[None, :]]
    return np.clip(image + noise, 0, 255).astype(np.uint8)


@cache
def _noise_tile() -> np.ndarray:
    """Return noise from -4 to 4 hashed from the cell number: as fast as numpy's own, but alike in every version."""
    cells = np.arange(4 * NOISE_SIDE * NOISE_SIDE, dtype=np.uint32)
    for factor in (2654435769, 2246822519, 3266489917):
        cells = (cells ^ (cells >> np.uint32(15))) * np.uint32(factor)
    noise = ((cells >> np.uint32(16)) % np.uint32(9)).astype(np.int16) - 4
    return noise.reshape(2 * NOISE_SIDE, 2 * NOISE_SIDE, 1)

"""The twenty things the procedural data set can show, each drawn by one short function.

A thing is drawn in a unit box: x runs from 0 (left) to 1 (right), y from 0 (top) to 1 (where it stands).
The Pen carries the box to its spot on the canvas, so no function here knows about pixels.
"""

import math
from collections.abc import Callable, Sequence

from PIL import ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Colour] = {
    "red": (214, 32, 36),
    "orange": (247, 134, 16),
    "yellow": (252, 220, 44),
    "green": (44, 158, 62),
    "blue": (38, 100, 230),
    "purple": (132, 54, 186),
    "pink": (252, 140, 192),
    "white": (248, 248, 248),
}

BLACK, WHITE, CREAM = (30, 28, 34), (250, 250, 250), (246, 234, 206)
BROWN, TAN, LEAF, GLASS = (112, 74, 46), (214, 166, 104), (72, 128, 64), (196, 222, 234)
AMBER, LEMON, ROSE, SILVER = (240, 140, 30), (250, 222, 96), (176, 44, 52), (186, 190, 202)

CIRCLE = [(math.cos(step * math.tau / 24), math.sin(step * math.tau / 24)) for step in range(24)]


def mix(first: Colour, second: Colour, amount: float) -> Colour:
    """Return the colour that lies `amount` (0 to 1) of the way from the first to the second."""
    red, green, blue = (round(a + (b - a) * amount) for a, b in zip(first, second, strict=True))
    return red, green, blue


class Pen:
    """Draws shapes given in the unit box of one thing onto the canvas, with an outline around their union."""

    def __init__(
        self,
        canvas: ImageDraw.ImageDraw,
        foot: Point,
        height: float,
        outline_width: int,
        body: Colour,
        mirrored: bool,
        lean: float,
    ) -> None:
        self.canvas = canvas
        self.foot = foot
        self.height = height
        self.mirror = -1 if mirrored else 1
        self.lean = lean
        self.outline_width = outline_width
        self.body = body
        pale = min(body) > 215
        self.shade = mix(body, (110, 118, 140), 0.4) if pale else mix(body, BLACK, 0.26)
        self.tint = mix(body, SILVER, 0.45) if pale else mix(body, WHITE, 0.5)
        self.outline = (84, 88, 104) if pale else mix(body, BLACK, 0.72)
        self.shapes: list[tuple[list[Point], Colour, int]] = []
        self.details: list[tuple[list[Point], Colour, int]] = []

    def unlike_body(self, first: Colour, second: Colour) -> Colour:
        """Return whichever of the two colours stands out more against the body."""
        return max(
            first,
            second,
            key=lambda colour: sum(abs(a - b) for a, b in zip(colour, self.body, strict=True)),
        )

    def polygon(
        self, points: Sequence[Point], fill: Colour | None = None, detail: bool = False
    ) -> None:
        """Add a filled polygon; a detail lies inside the thing and gets no outline."""
        self._add(points, fill, 0, detail)

    def box(
        self,
        left: float,
        top: float,
        right: float,
        bottom: float,
        fill: Colour | None = None,
        detail: bool = False,
    ) -> None:
        self._add([(left, top), (right, top), (right, bottom), (left, bottom)], fill, 0, detail)

    def ellipse(
        self,
        x: float,
        y: float,
        across: float,
        down: float,
        fill: Colour | None = None,
        turn: float = 0,
        detail: bool = False,
    ) -> None:
        """Add an ellipse around (x, y) with the two given radii, turned clockwise by `turn` degrees."""
        cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        points = [
            (x + across * a * cos - down * b * sin, y + across * a * sin + down * b * cos)
            for a, b in CIRCLE
        ]
        self._add(points, fill, 0, detail)

    def line(
        self,
        points: Sequence[Point],
        width: float,
        fill: Colour | None = None,
        detail: bool = False,
    ) -> None:
        self._add(points, fill, max(1, round(width * self.height)), detail)

    def _add(self, points: Sequence[Point], fill: Colour | None, width: int, detail: bool) -> None:
        placed = []
        for x, y in points:
            u, v = (x - 0.5) * self.mirror, y - 1
            # The lean is a turn by a small angle, for which cos is 1 and sin the angle itself.
            across, down = u - v * self.lean, v + u * self.lean
            placed.append(
                (
                    round(self.foot[0] + across * self.height),
                    round(self.foot[1] + down * self.height),
                )
            )
        (self.details if detail else self.shapes).append((placed, fill or self.body, width))

    def ink(self) -> None:
        """Put what was added so far on the canvas: first all outlines, so that they merge, then the fills."""
        for points, _, width in self.shapes:
            closed = points if width else points + points[:2]
            # Joints cost time and only show on sharp corners, not on the many blunt ones of an ellipse.
            joint = "curve" if len(points) < 12 else None
            self.canvas.line(closed, self.outline, width + 2 * self.outline_width, joint)
        for points, fill, width in self.shapes + self.details:
            if width:
                self.canvas.line(points, fill, width, "curve")
            else:
                self.canvas.polygon(points, fill)
        self.shapes, self.details = [], []


def _spiral(x: float, y: float, radius: float, turns: float, steps: int = 22) -> list[Point]:
    angles = [(step / steps, step / steps * turns * math.tau) for step in range(steps + 1)]
    return [
        (x + radius * grown * math.cos(angle), y + radius * grown * math.sin(angle))
        for grown, angle in angles
    ]


def _eye(pen: Pen, x: float, y: float, radius: float = 0.05) -> None:
    pen.ellipse(x, y, radius, radius, WHITE, detail=True)
    pen.ellipse(x + radius * 0.2, y, radius * 0.62, radius * 0.62, BLACK, detail=True)


def _tree(pen: Pen) -> None:
    pen.box(0.43, 0.55, 0.57, 1, BROWN)
    for x, y, radius in (
        (0.27, 0.47, 0.2),
        (0.73, 0.47, 0.2),
        (0.36, 0.24, 0.2),
        (0.64, 0.24, 0.2),
        (0.5, 0.42, 0.26),
    ):
        pen.ellipse(x, y, radius, radius)
    for x, y in ((0.32, 0.52), (0.66, 0.5), (0.55, 0.27)):
        pen.ellipse(x, y, 0.09, 0.04, pen.shade, detail=True)
    pen.ellipse(0.34, 0.22, 0.08, 0.05, pen.tint, detail=True)


def _flower(pen: Pen) -> None:
    pen.line([(0.5, 0.4), (0.5, 1)], 0.07, LEAF)
    pen.ellipse(0.66, 0.83, 0.16, 0.06, LEAF, turn=-30)
    pen.ellipse(0.34, 0.88, 0.16, 0.06, LEAF, turn=30)
    pen.ink()
    for step in range(6):
        turn = step * 60 + 30
        x, y = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        pen.ellipse(0.5 + 0.22 * x, 0.34 + 0.22 * y, 0.15, 0.13, turn=turn)
        pen.line(
            [(0.5 + 0.1 * x, 0.34 + 0.1 * y), (0.5 + 0.26 * x, 0.34 + 0.26 * y)],
            0.025,
            pen.shade,
            detail=True,
        )
    pen.ellipse(0.5, 0.34, 0.11, 0.11, pen.unlike_body(LEMON, BROWN), detail=True)


def _mushroom(pen: Pen) -> None:
    pen.polygon([(0.4, 0.5), (0.6, 0.5), (0.66, 1), (0.34, 1)], CREAM)
    pen.ink()
    dome = [(0.5 + 0.47 * x, 0.56 + 0.5 * y) for x, y in CIRCLE if y < 0.01]
    pen.polygon([*dome, (0.92, 0.62), (0.08, 0.62)])
    for x, y, radius in (
        (0.5, 0.22, 0.09),
        (0.26, 0.42, 0.08),
        (0.73, 0.4, 0.08),
        (0.5, 0.5, 0.06),
    ):
        pen.ellipse(x, y, radius, radius * 0.85, pen.unlike_body(WHITE, SILVER), detail=True)


def _cactus(pen: Pen) -> None:
    pen.line([(0.5, 0.68), (0.2, 0.68), (0.2, 0.36)], 0.15)
    pen.line([(0.5, 0.58), (0.8, 0.58), (0.8, 0.24)], 0.15)
    for x, y in ((0.2, 0.36), (0.8, 0.24), (0.2, 0.68), (0.8, 0.58)):
        pen.ellipse(x, y, 0.075, 0.075)
    pen.box(0.38, 0.14, 0.62, 1)
    pen.ellipse(0.5, 0.14, 0.12, 0.12)
    for x in (0.45, 0.55):
        pen.line([(x, 0.14), (x, 0.96)], 0.025, pen.shade, detail=True)
    pen.line([(0.2, 0.36), (0.2, 0.66)], 0.025, pen.shade, detail=True)
    pen.line([(0.8, 0.26), (0.8, 0.56)], 0.025, pen.shade, detail=True)


def _mountain(pen: Pen) -> None:
    pen.polygon([(0, 1), (0.29, 0.48), (0.36, 0.55), (0.58, 0.08), (1, 1)])
    pen.polygon([(0.58, 0.08), (1, 1), (0.66, 1), (0.7, 0.7), (0.6, 0.5)], pen.shade, detail=True)
    cap = [(0.58, 0.08), (0.73, 0.38), (0.64, 0.33), (0.58, 0.42), (0.51, 0.33), (0.44, 0.38)]
    pen.polygon(cap, pen.unlike_body(WHITE, SILVER), detail=True)


def _cat(pen: Pen) -> None:
    pen.line([(0.66, 0.93), (0.9, 0.88), (0.95, 0.7), (0.87, 0.56)], 0.1)
    pen.ellipse(0.52, 0.77, 0.25, 0.24)
    pen.box(0.36, 0.7, 0.5, 1)
    pen.line([(0.5, 0.76), (0.5, 0.98)], 0.025, pen.shade, detail=True)
    pen.ink()
    pen.polygon([(0.14, 0.04), (0.16, 0.36), (0.42, 0.2)])
    pen.polygon([(0.72, 0.04), (0.7, 0.36), (0.44, 0.2)])
    pen.ellipse(0.43, 0.36, 0.3, 0.24)
    for side in (-1, 1):
        pen.ellipse(0.43 + side * 0.12, 0.33, 0.05, 0.065, WHITE, detail=True)
        pen.ellipse(0.43 + side * 0.12, 0.33, 0.028, 0.06, BLACK, detail=True)
        for drop in (0, 0.07):
            whisker = [(0.43 + side * 0.12, 0.44 + drop / 2), (0.43 + side * 0.36, 0.42 + drop)]
            pen.line(whisker, 0.018, pen.outline, detail=True)
    pen.polygon([(0.38, 0.41), (0.48, 0.41), (0.43, 0.47)], pen.outline, detail=True)


def _duck(pen: Pen) -> None:
    for x in (0.48, 0.62):
        pen.line([(x, 0.84), (x, 0.98), (x - 0.1, 0.98)], 0.045, pen.unlike_body(AMBER, BROWN))
    pen.polygon([(0.18, 0.22), (0.2, 0.34), (0, 0.34), (0, 0.28)], pen.unlike_body(AMBER, LEMON))
    pen.ink()
    pen.polygon([(0.3, 0.3), (0.5, 0.3), (0.52, 0.6), (0.26, 0.6)])
    pen.ellipse(0.55, 0.67, 0.35, 0.21)
    pen.polygon([(0.75, 0.58), (1, 0.4), (0.88, 0.75)])
    pen.ellipse(0.35, 0.25, 0.19, 0.18)
    pen.ellipse(0.62, 0.66, 0.19, 0.1, pen.shade, detail=True)
    pen.ellipse(0.62, 0.63, 0.18, 0.085, pen.body, detail=True)
    _eye(pen, 0.29, 0.21)


def _fish(pen: Pen) -> None:
    pen.polygon([(0.7, 0.58), (1, 0.3), (0.92, 0.58), (1, 0.88)])
    pen.polygon([(0.28, 0.36), (0.5, 0.14), (0.66, 0.4)], pen.shade)
    pen.polygon([(0.4, 0.78), (0.62, 0.98), (0.6, 0.76)], pen.shade)
    pen.ink()
    pen.ellipse(0.41, 0.58, 0.41, 0.27)
    pen.line([(0.3, 0.37), (0.36, 0.58), (0.3, 0.79)], 0.03, pen.shade, detail=True)
    for x, y in ((0.5, 0.5), (0.5, 0.68), (0.64, 0.5), (0.64, 0.66)):
        pen.line([(x, y - 0.05), (x + 0.04, y), (x, y + 0.05)], 0.025, pen.shade, detail=True)
    _eye(pen, 0.17, 0.51, 0.065)
    pen.line([(0.03, 0.66), (0.14, 0.68)], 0.03, pen.outline, detail=True)


def _snail(pen: Pen) -> None:
    for x in (0.03, 0.17):
        pen.line([(0.13, 0.6), (x, 0.36)], 0.035, TAN)
        pen.ellipse(x, 0.36, 0.035, 0.035, BLACK)
    pen.ellipse(0.14, 0.67, 0.12, 0.12, TAN)
    pen.polygon(
        [(0.04, 0.68), (0.26, 0.68), (0.34, 0.84), (0.8, 0.84), (1, 0.99), (0.12, 0.99)], TAN
    )
    pen.ellipse(0.11, 0.63, 0.025, 0.03, BLACK, detail=True)
    pen.ink()
    pen.ellipse(0.59, 0.53, 0.37, 0.37)
    pen.line(_spiral(0.6, 0.54, 0.31, 2.1), 0.045, pen.shade, detail=True)


def _butterfly(pen: Pen) -> None:
    for side in (-1, 1):
        pen.line([(0.5, 0.3), (0.5 + side * 0.14, 0.06)], 0.025, BLACK)
        pen.ellipse(0.5 + side * 0.27, 0.72, 0.2, 0.16, turn=side * 50)
        pen.ellipse(0.5 + side * 0.25, 0.38, 0.28, 0.2, turn=side * -38)
        pen.ellipse(0.5 + side * 0.3, 0.34, 0.1, 0.08, pen.tint, turn=side * -38, detail=True)
        pen.ellipse(0.5 + side * 0.29, 0.75, 0.07, 0.06, pen.shade, detail=True)
    pen.ellipse(0.5, 0.55, 0.055, 0.3, BLACK, detail=True)
    pen.ellipse(0.5, 0.26, 0.07, 0.07, BLACK, detail=True)


def _house(pen: Pen) -> None:
    pen.box(0.68, 0.06, 0.8, 0.4, pen.shade)
    pen.box(0.12, 0.44, 0.88, 1)
    pen.ink()
    pen.polygon([(0.5, 0.06), (1, 0.48), (0, 0.48)], pen.shade)
    pen.ink()
    pen.box(0.2, 0.66, 0.36, 1, BROWN, detail=True)
    pen.box(0.5, 0.6, 0.78, 0.82, LEMON, detail=True)
    pen.line([(0.64, 0.6), (0.64, 0.82)], 0.03, pen.outline, detail=True)
    pen.line([(0.5, 0.71), (0.78, 0.71)], 0.03, pen.outline, detail=True)


def _taxi(pen: Pen) -> None:
    pen.polygon([(0.2, 0.62), (0.34, 0.36), (0.7, 0.36), (0.86, 0.62)])
    pen.polygon([(0, 0.66), (0.08, 0.58), (0.94, 0.58), (1, 0.66), (1, 0.88), (0, 0.88)])
    pen.polygon([(0.29, 0.59), (0.38, 0.42), (0.5, 0.42), (0.5, 0.59)], GLASS, detail=True)
    pen.polygon([(0.56, 0.59), (0.56, 0.42), (0.67, 0.42), (0.76, 0.59)], GLASS, detail=True)
    pen.box(0.01, 0.67, 0.08, 0.74, LEMON, detail=True)
    pen.ink()
    _wheels(pen, (0.22, 0.78), 0.14)


def _bus(pen: Pen) -> None:
    pen.polygon([(0, 0.24), (0.04, 0.18), (0.97, 0.18), (1, 0.24), (1, 0.9), (0, 0.9)])
    pen.box(0.04, 0.28, 0.18, 0.68, GLASS, detail=True)
    for x in (0.26, 0.5, 0.74):
        pen.box(x, 0.28, x + 0.18, 0.52, GLASS, detail=True)
    pen.box(0.26, 0.62, 0.98, 0.67, pen.shade, detail=True)
    pen.ink()
    _wheels(pen, (0.24, 0.76), 0.115)


def _wheels(pen: Pen, centres: tuple[float, float], radius: float) -> None:
    for x in centres:
        pen.ellipse(x, 1 - radius, radius, radius, BLACK)
        pen.ellipse(x, 1 - radius, radius * 0.45, radius * 0.45, SILVER, detail=True)


def _tower(pen: Pen) -> None:
    pen.box(0.29, 0.22, 0.71, 1)
    pen.box(0.21, 0.14, 0.79, 0.3)
    for x in (0.21, 0.43, 0.65):
        pen.box(x, 0.02, x + 0.14, 0.16)
    pen.box(0.29, 0.31, 0.71, 0.35, pen.shade, detail=True)
    pen.box(0.6, 0.35, 0.71, 1, pen.shade, detail=True)
    pen.box(0.43, 0.44, 0.53, 0.6, pen.outline, detail=True)
    pen.box(0.4, 0.8, 0.57, 1, BROWN, detail=True)
    pen.ellipse(0.485, 0.8, 0.085, 0.08, BROWN, detail=True)


def _lamp(pen: Pen) -> None:
    pen.box(0.44, 0.4, 0.56, 1)
    pen.polygon([(0.36, 0.88), (0.64, 0.88), (0.7, 1), (0.3, 1)])
    pen.polygon([(0.26, 0.14), (0.74, 0.14), (0.64, 0.42), (0.36, 0.42)])
    pen.polygon([(0.5, -0.04), (0.82, 0.16), (0.18, 0.16)])
    pen.box(0.34, 0.41, 0.66, 0.47)
    pen.polygon([(0.33, 0.18), (0.67, 0.18), (0.6, 0.4), (0.4, 0.4)], (255, 246, 190), detail=True)
    pen.line([(0.5, 0.18), (0.5, 0.4)], 0.035, pen.shade, detail=True)


def _apple(pen: Pen) -> None:
    pen.line([(0.5, 0.3), (0.55, 0.06)], 0.06, BROWN)
    pen.ellipse(0.72, 0.12, 0.17, 0.08, LEAF, turn=-20)
    pen.ink()
    for side in (-1, 1):
        pen.ellipse(0.5 + side * 0.17, 0.56, 0.28, 0.34)
        pen.ellipse(0.5 + side * 0.12, 0.74, 0.22, 0.25)
    pen.ellipse(0.5, 0.26, 0.1, 0.035, pen.shade, detail=True)
    pen.ellipse(0.29, 0.46, 0.06, 0.12, pen.tint, turn=20, detail=True)


def _cake(pen: Pen) -> None:
    pen.box(0, 0.93, 1, 1, SILVER)
    for x in (0.3, 0.5, 0.7):
        pen.box(x - 0.03, 0.16, x + 0.03, 0.42, CREAM)
        pen.ellipse(x, 0.1, 0.035, 0.06, AMBER)
    pen.ink()
    pen.box(0.06, 0.42, 0.94, 0.93)
    pen.box(0.06, 0.7, 0.94, 0.76, pen.shade, detail=True)
    pen.box(0.06, 0.4, 0.94, 0.48, pen.tint, detail=True)
    for step in range(5):
        pen.ellipse(
            0.148 + step * 0.176, 0.48, 0.088, 0.07 + 0.05 * (step % 2), pen.tint, detail=True
        )


def _pizza(pen: Pen) -> None:
    pen.polygon([(0.04, 0.2), (0.96, 0.2), (0.5, 1)])
    for x, y, radius in ((0.33, 0.38, 0.09), (0.66, 0.36, 0.09), (0.5, 0.62, 0.09)):
        pen.ellipse(x, y, radius, radius, pen.unlike_body(ROSE, LEMON), detail=True)
    for x, y in ((0.5, 0.42), (0.41, 0.54), (0.62, 0.52), (0.5, 0.8)):
        pen.ellipse(x, y, 0.03, 0.03, pen.shade, detail=True)
    pen.ink()
    pen.line([(0.08, 0.22), (0.2, 0.14), (0.5, 0.1), (0.8, 0.14), (0.92, 0.22)], 0.14, TAN)
    for x in (0.08, 0.92):
        pen.ellipse(x, 0.22, 0.07, 0.07, TAN)


def _lollipop(pen: Pen) -> None:
    pen.box(0.465, 0.6, 0.535, 1, WHITE)
    pen.ink()
    pen.ellipse(0.5, 0.33, 0.34, 0.34)
    pen.line(_spiral(0.5, 0.33, 0.3, 2.2), 0.06, pen.tint, detail=True)


def _ice_cream(pen: Pen) -> None:
    pen.polygon([(0.26, 0.5), (0.74, 0.5), (0.5, 1)], TAN)
    for first, last in (
        ((0.36, 0.5), (0.57, 0.85)),
        ((0.64, 0.5), (0.43, 0.85)),
        ((0.3, 0.58), (0.5, 0.98)),
    ):
        pen.line([first, last], 0.025, BROWN, detail=True)
    pen.ink()
    for x in (0.3, 0.5, 0.7):
        pen.ellipse(x, 0.49, 0.12, 0.09)
    pen.ellipse(0.5, 0.36, 0.29, 0.2)
    pen.ink()
    pen.ellipse(0.5, 0.17, 0.22, 0.19)
    pen.ellipse(0.42, 0.11, 0.06, 0.05, pen.tint, detail=True)
    pen.ellipse(0.34, 0.35, 0.06, 0.04, pen.tint, detail=True)


THINGS: dict[str, Callable[[Pen], None]] = {
    "tree": _tree, "flower": _flower, "mushroom": _mushroom, "cactus": _cactus, "mountain": _mountain,
    "cat": _cat, "duck": _duck, "fish": _fish, "snail": _snail, "butterfly": _butterfly,
    "house": _house, "taxi": _taxi, "bus": _bus, "tower": _tower, "lamp": _lamp,
    "apple": _apple, "cake": _cake, "pizza": _pizza, "lollipop": _lollipop, "ice-cream": _ice_cream,
}  # fmt: skip

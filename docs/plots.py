"""Draws the plots of some pages from the tables that stand beside them, so that a plot cannot say something else.

    make docs

Each becomes an SVG file that follows the reader's light or dark colours. A test checks that they are fresh.
"""

from __future__ import annotations

import html
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 20, 64
LINE = 24
"""Height of a line of the legend."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's palette, as in reports."""
STYLE = """\
<style>
text{font:15px system-ui,sans-serif;fill:#24292f}
.grid{stroke:#d0d7de}.axis,.tie{stroke:#57606a}.tie{stroke-dasharray:5 4}.back{fill:#fff}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.grid{stroke:#30363d}.axis,.tie{stroke:#8b949e}.back{fill:#0d1117}
}
</style>"""


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    joined: bool = True
    dots: bool = True


@dataclass(frozen=True)
class Axis:
    """What is measured along a side, between which values; `ticks` may have names instead of numbers."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """How far along the side a value is."""
        scale = math.log if self.logarithmic else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))


def numbered(
    title: str,
    low: float,
    high: float,
    ticks: Sequence[float],
    unit: str = "",
    *,
    log: bool = False,
) -> Axis:
    return Axis(title, low, high, [(tick, f"{tick:,g}{unit}") for tick in ticks], log)


def draw(about: str, x: Axis, y: Axis, series: Sequence[Series], *, tie: bool = False) -> str:
    """A plot of lines and dots. With `tie`, a dashed line where both axes say the same."""
    legend = LINE * len(series)
    floor = HEIGHT - BOTTOM

    def across(value: float) -> float:
        return LEFT + x.share(value) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return floor - y.share(value) * (floor - TOP)

    def line(kind: str, x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
        return (
            f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{more}/>'
        )

    def words(text: str, at_x: float, at_y: float, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + legend}" role="img">',
        f"<title>{html.escape(about)}</title>{STYLE}",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT + legend}"/>',
    ]
    for value, name in y.ticks:
        parts += [
            line("grid", LEFT, up(value), WIDTH - RIGHT, up(value)),
            words(name, LEFT - 8, up(value) + 5, "end"),
        ]
    for value, name in x.ticks:
        parts += [
            line("axis", across(value), floor, across(value), floor + 5),
            words(name, across(value), floor + 22),
        ]
    parts += [
        line("axis", LEFT, floor, WIDTH - RIGHT, floor),
        words(x.title, (LEFT + WIDTH - RIGHT) / 2, floor + 46),
        words(
            y.title,
            16,
            (TOP + floor) / 2,
            more=f' transform="rotate(-90 16 {(TOP + floor) / 2:.1f})"',
        ),
    ]
    if tie:
        low, high = max(x.low, y.low), min(x.high, y.high)
        parts.append(line("tie", across(low), up(low), across(high), up(high)))
    for at, one in enumerate(series):
        colour = COLOURS[at % len(COLOURS)]
        stroke = f' stroke="{colour}" stroke-width="2"'
        spots = [(across(point.x), up(point.y)) for point in one.points]
        if one.joined:
            parts.append(
                f'<polyline fill="none"{stroke} points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in spots)}"/>'
            )
        for point, (a, b) in zip(one.points, spots, strict=True):
            if point.low is not None and point.high is not None:
                parts.append(line("range", a, up(point.low), a, up(point.high), stroke))
            if one.dots:
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" fill="{colour}"/>')
        below = HEIGHT + LINE * at + 6
        parts.append(f'<circle cx="{LEFT + 6}" cy="{below - 4}" r="4.5" fill="{colour}"/>')
        parts.append(words(one.name, LEFT + 20, below, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the table on a page whose head begins so, row by row."""
    lines = (HERE / page).read_text(encoding="utf-8").splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith(heading)]
    assert heads, (
        f"docs/{page} has no table that begins with {heading!r}, which docs/plots.py draws"
    )
    rows = []
    for line in lines[heads[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def value(cell: str) -> float:
    """The first number in a cell."""
    found = re.search(r"\d[\d,]*\.?\d*", cell)
    assert found, f"no number in {cell!r}"
    return float(found[0].replace(",", ""))


def how_many_photos() -> str:
    """What more photos bring, with the recipe `heads`."""
    rows = [row for row in table("finetune.md", "| photos to learn from") if "chance" not in row[0]]
    photos = [value(row[0]) for row in rows]
    series = [
        Series(name, [Point(x, value(row[column])) for x, row in zip(photos, rows, strict=True)])
        for name, column in (("R@10", 3), ("R@1, corrected for hubness", 2), ("R@1", 1))
    ]
    x = numbered("photos to learn from", min(photos) * 0.8, max(photos) * 1.25, photos, log=True)
    y = numbered("captions that find their photo", 0, 80, range(0, 81, 20), " %")
    return draw("Recall against the number of photos that heads learn from", x, y, series)


def how_hard() -> str:
    """How recall falls with the number of photos to choose from."""
    lines = (HERE / "intervals.md").read_text(encoding="utf-8").splitlines()
    (head,) = (line for line in lines if line.startswith("| photos to choose from"))
    photos = [value(cell) for cell in head.strip("|").split("|")[1:]]
    series = [
        Series(
            row[0].replace("`", ""),
            [Point(x, value(cell)) for x, cell in zip(photos, row[1:], strict=True)],
        )
        for row in table("intervals.md", "| photos to choose from")
    ]
    x = numbered("photos to choose from", min(photos) * 0.8, max(photos) * 1.25, photos, log=True)
    y = numbered("captions that find their own photo first", 0, 100, range(0, 101, 20), " %")
    guessing = Series("guessing", [Point(x, 100 / x) for x in photos])
    return draw("The same models among more and more photos", x, y, [*series, guessing])


def probed_and_trained() -> str:
    """What `lapclip probe` predicted, and what training gave."""
    rows = table("probe.md", "| towers | linear fit")
    predicted = [Point(at - 0.08, value(row[2])) for at, row in enumerate(rows)]
    trained = []
    for at, row in enumerate(rows):
        low, high = (float(number) for number in re.findall(r"[\d.]+", row[3])[1:3])
        trained.append(Point(at + 0.08, value(row[3]), low, high))
    x = Axis(
        "image and text tower", -0.5, len(rows) - 0.5, [(at, row[0]) for at, row in enumerate(rows)]
    )
    y = numbered("text-to-image R@1 of 1,000", 20, 32, range(20, 33, 2), " %")
    series = [
        Series("predicted by lapclip probe", predicted, False),
        Series("trained, with 95 % interval", trained, False),
    ]
    return draw("Recall that lapclip probe predicts beside what training gives", x, y, series)


def predicted_steps() -> str:
    """Steps of two computers: predicted before the run, and as they were."""
    rows = table("together.md", "| | predicted | true |")
    by_model: dict[str, list[Point]] = {}
    for name, predicted, true in rows:
        by_model.setdefault(name.split(",")[0].replace("`", ""), []).append(
            Point(value(predicted), value(true))
        )
    x, y = (
        numbered(title, 0.1, 100, (0.1, 1, 10, 100), " s", log=True)
        for title in ("predicted step", "measured step")
    )
    series = [Series(name, points, False) for name, points in by_model.items()]
    return draw("Steps of two computers, predicted and measured", x, y, series, tie=True)


PLOTS: dict[str, Callable[[], str]] = {
    "how-many-photos.svg": how_many_photos,
    "how-hard.svg": how_hard,
    "probed-and-trained.svg": probed_and_trained,
    "predicted-steps.svg": predicted_steps,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in PLOTS.items():
        (folder / name).write_text(make(), encoding="utf-8", newline="\n")
        print(folder / name)

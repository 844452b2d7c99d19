from __future__ import annotations

import pytest

from lapclip.runs.curves import Curve
from lapclip.watch import panels


def line(*values: float) -> Curve:
    return Curve([float(at) for at in range(len(values))], list(values))


def heights(lines: list[str]) -> list[int]:
    """How high the topmost dot of each column of characters is, in dots from the bottom; -1 where there is none."""
    dots = ((0x09, 0), (0x12, 1), (0x24, 2), (0xC0, 3))
    found = []
    for column in zip(*lines, strict=True):
        rows = [
            4 * at + row
            for at, cell in enumerate(column)
            for mask, row in dots
            if ord(cell) - 0x2800 & mask
        ]
        found.append(4 * len(lines) - 1 - min(rows) if rows else -1)
    return found


@pytest.mark.parametrize(
    ("count", "width", "height"), [(1, 10, 1), (2, 10, 2), (7, 40, 3), (5000, 40, 2), (3, 1, 1)]
)
def test_a_curve_fills_its_place_without_a_gap(count: int, width: int, height: int) -> None:
    lines = panels.curve(line(*((at * 37 % 11) / 11 for at in range(count))), width, height)
    assert [len(line) for line in lines] == [width] * height
    assert min(heights(lines)) >= 0


def test_a_rising_curve_rises_from_the_bottom_to_the_top_and_a_falling_one_falls() -> None:
    rising = heights(panels.curve(line(*range(100)), 20, 3))
    assert rising == sorted(rising)
    assert (rising[0], rising[-1]) == (0, 11)
    falling = heights(panels.curve(line(3.0, 2.0, 1.0), 20, 3))
    assert falling == sorted(falling, reverse=True)


def test_places_go_by_the_steps_and_not_by_how_many_are_known() -> None:
    straight = Curve(
        [*range(100), *range(100, 1000, 100), 1000.0], [*range(100), *range(100, 1000, 100), 1000.0]
    )
    even = panels.evenly(straight, 10)
    assert even == pytest.approx([50, 150, 250, 350, 450, 550, 650, 750, 850, 950], abs=60)
    assert panels.evenly(Curve([5.0, 5.0], [1.0, 2.0]), 3) == [2.0] * 3


def test_a_step_is_drawn_as_an_unbroken_line() -> None:
    (top, bottom) = panels.curve(line(*[0.0] * 10, *[1.0] * 10), 10, 2)
    joined = [ord(a) - 0x2800 for a in top + bottom]
    # All eight rows of dots are used somewhere around the step.
    assert all(any(cell & mask for cell in joined[:10]) for mask in (0x09, 0x12, 0x24, 0xC0))
    assert all(any(cell & mask for cell in joined[10:]) for mask in (0x09, 0x12, 0x24, 0xC0))


def test_no_values_leave_the_place_empty_and_a_level_curve_runs_through_the_middle() -> None:
    assert panels.curve(line(), 5, 2) == ["     "] * 2
    assert set(heights(panels.curve(line(*[0.3] * 9), 5, 2))) <= {3, 4}


@pytest.mark.parametrize("part_done", [-1.0, 0.0, 0.26, 0.5, 1.0, 7.0])
def test_a_bar_is_as_wide_as_it_should_be(part_done: float) -> None:
    done, rest = panels.bar(part_done, 10)
    assert len(done + rest) == 10
    assert bool(done) == (part_done > 0)


def test_small_phases_are_seen_and_the_bar_is_full() -> None:
    counts = panels.split([0.001, 0.6, 0.0, 0.399], 30)
    assert sum(counts) == 30
    assert counts[0] == 1
    assert counts[2] == 0
    assert counts[1] > counts[3] > 10
    assert panels.split([0.0, 0.0], 10) == [0, 0]
    assert sum(panels.split([1.0] * 7, 3)) >= 3  # more phases than room: each still has its place

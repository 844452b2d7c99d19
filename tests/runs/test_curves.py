from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lapclip.runs.curves import Curve, curve, samples, smoothed, thinned, windows
from lapclip.text import number

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


def counted(values: list[float]) -> Curve:
    return Curve([float(at) for at in range(len(values))], values)


def test_only_finite_numbers_are_numbers() -> None:
    assert [number(value) for value in (1, 0.5, True, None, "3", math.nan, math.inf)] == [
        1,
        0.5,
        *[None] * 5,
    ]


def test_events_without_the_figure_are_passed_over() -> None:
    events = [
        {"step": 1, "loss": 2.0},
        {"step": 2},
        {"step": 3, "loss": math.nan},
        {"step": 4, "loss": 1.0},
    ]
    assert curve(events, lambda event: event.get("loss")) == Curve([1, 4], [2.0, 1.0])


@given(VALUES)
def test_smoothing_stays_within_the_values_and_keeps_their_number(values: list[float]) -> None:
    smooth = smoothed(counted(values))
    assert len(smooth) == len(values)
    slack = 1e-6 * max(1.0, *(abs(value) for value in values))
    assert all(min(values) - slack <= value <= max(values) + slack for value in smooth.y)


def test_smoothing_does_not_lag_behind_a_falling_line() -> None:
    line = counted([1000.0 - at for at in range(1000)])
    smooth = smoothed(line)
    assert all(abs(a - b) < 1e-6 for a, b in zip(line.y[50:-50], smooth.y[50:-50], strict=True))


@given(st.lists(st.floats(-1e6, 1e6), min_size=30, max_size=300))
def test_thinning_keeps_ends_and_extremes(values: list[float]) -> None:
    thin = thinned(counted(values), most=20)
    assert len(thin) <= 22
    assert (thin.x[0], thin.x[-1]) == (0, len(values) - 1)
    assert thin.x == sorted(set(thin.x))
    assert (min(thin.y), max(thin.y)) == (min(values), max(values))


def test_windows_are_medians_at_their_last_x() -> None:
    assert windows(counted([1, 9, 2, 5, 5, 50, 7]), most=3) == Curve([2, 5, 6], [2, 5, 7])
    assert windows(counted([1, 9, 2, 5, 5, 50, 7]), least=5) == Curve([4, 6], [5, 28.5])


@given(st.integers(1, 1000))
def test_samples_hold_the_first_and_the_last(count: int) -> None:
    chosen = samples(count)
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert len(chosen) == len(set(chosen)) <= 8

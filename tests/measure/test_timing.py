from __future__ import annotations

import pytest

from lapclip.errors import LapclipError
from lapclip.measure.timing import Timer, Timing, run_in_new_process


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def task(self, *seconds: float, log: list[str] | None = None, name: str = ""):
        """Return a callable that takes these seconds, one after the other, and then the last of them."""
        remaining = list(seconds)

        def run() -> None:
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]
            if log is not None:
                log.append(name)

        return run


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_timing_has_a_median_and_a_spread() -> None:
    timing = Timing((1.0, 2.0, 5.0))
    assert timing.median == 2.0
    assert timing.spread == 2.0
    assert timing.total == 8.0
    assert str(Timing((0.0123,))) == "12.3 ms"


def test_candidates_take_turns_and_the_warm_up_does_not_count(clock: Clock) -> None:
    log: list[str] = []
    runs = {
        "a": clock.task(100.0, 1.0, 7.0, 2.0, log=log, name="a"),
        "b": clock.task(50.0, 3.0, log=log, name="b"),
    }
    timer = Timer(rounds=3, max_seconds=1000.0, clock=clock)
    timings = timer.time_in_turns(runs)
    assert timings == {"a": Timing((1.0, 7.0, 2.0)), "b": Timing((3.0, 3.0, 3.0))}
    assert log == ["a", "b"] * 4


@pytest.mark.parametrize(
    ("warm_up_rounds", "min_rounds", "max_seconds", "timed"),
    [(1, 1, 0.0, 1), (1, 2, 0.0, 2), (0, 1, 0.0, 1), (1, 1, 3.5, 3), (1, 1, 100.0, 9)],
)
def test_time_is_limited_but_not_below_the_rounds_that_are_needed(
    clock: Clock, warm_up_rounds: int, min_rounds: int, max_seconds: float, timed: int
) -> None:
    timer = Timer(
        rounds=9,
        min_rounds=min_rounds,
        max_seconds=max_seconds,
        warm_up_rounds=warm_up_rounds,
        clock=clock,
    )
    assert len(timer.time_one(clock.task(1.0)).seconds) == timed


def test_the_device_has_finished_before_and_after_each_run(clock: Clock) -> None:
    order: list[str] = []
    timer = Timer(lambda: order.append("synchronize"), clock=clock)
    timer.time_once(lambda: order.append("run"))
    assert order == ["synchronize", "run", "synchronize"]


def test_a_callable_is_timed_until_it_is_enough(clock: Clock) -> None:
    timing = Timer(clock=clock).time_until(clock.task(1.0), lambda timing: timing.total >= 3)
    assert timing == Timing((1.0, 1.0, 1.0))


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(LapclipError, match="No module named"):
        run_in_new_process("lapclip.measure.nothing", {})

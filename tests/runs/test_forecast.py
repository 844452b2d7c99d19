from __future__ import annotations

import random
from typing import Any

import pytest

from lapclip.runs.forecast import Forecast, evaluations_to_come, forecast
from lapclip.runs.summary import summarise

STEPS = 100


def started(steps: int = STEPS, every: int = 0, steps_per_epoch: int = 10) -> dict[str, Any]:
    config = {"train": {"batch_size": 8, "steps": steps, "evaluate_every_epochs": every}}
    return {
        "type": "started",
        "time": 0.0,
        "steps": steps,
        "steps_per_epoch": steps_per_epoch,
        "config": config,
    }


def step(number: int, time: float) -> dict[str, Any]:
    return {"type": "step", "step": number, "time": time}


def evaluation(number: int, time: float, seconds: float) -> dict[str, Any]:
    return {
        "type": "evaluation",
        "step": number,
        "time": time,
        "seconds": seconds,
        "evaluation": {"t2i_r1": 0.5},
    }


def paced(gaps: list[float], steps: int = STEPS) -> list[dict[str, Any]]:
    """A run whose steps came after these gaps."""
    times = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    return [started(steps), step(1, 0.0), *(step(at, time) for at, time in enumerate(times, 2))]


def known(events: list[dict[str, Any]]) -> Forecast:
    found = forecast(summarise(events))
    assert found is not None
    return found


def test_a_steady_run_is_told_to_the_second() -> None:
    found = known(paced([2.0] * 39))
    assert found.seconds == pytest.approx(60 * 2.0)
    assert found.low == pytest.approx(found.seconds)
    assert found.high == pytest.approx(found.seconds)


def test_a_noisy_run_has_a_range_that_grows_with_the_noise() -> None:
    draw = random.Random(0)
    calm, wild = ([2.0 + draw.uniform(-spread, spread) for _ in range(39)] for spread in (0.2, 1.0))
    widths = []
    for gaps in (calm, wild):
        found = known(paced(gaps))
        assert found.seconds == pytest.approx(60 * sum(gaps) / len(gaps))
        assert 0 < found.low < found.seconds < found.high
        widths.append((found.high - found.low) / found.seconds)
    assert widths[1] > 2 * widths[0] > 0


def test_few_steps_make_a_wide_range_and_fewer_none() -> None:
    gaps = [2.0, 2.4, 1.9, 2.2]
    many = [*gaps] * 9
    few, sure = known(paced(gaps)), known(paced(many))
    assert few.high / few.seconds > sure.high / sure.seconds
    assert forecast(summarise(paced([2.0, 2.0]))) is None
    assert forecast(summarise([])) is None


def test_a_machine_that_slept_is_not_slow() -> None:
    events = paced([2.0] * 39)
    slept = [
        {**event, "time": event["time"] + (3600 if event.get("step", 0) > 20 else 0)}
        for event in events
    ]
    assert known(slept) == known(events)


def test_a_polite_pause_is_not_slow_even_if_short() -> None:
    events = paced([2.0] * 39)
    later = [{**event, "time": event["time"] + 30} for event in events[21:]]
    pause = [
        {
            "type": "paused",
            "step": 20,
            "time": events[20]["time"],
            "reason": "on battery below 30 %",
        },
        {"type": "went_on", "step": 20, "time": events[20]["time"] + 30, "seconds": 30.0},
    ]
    summary = summarise([*events[:21], *pause, *later])
    assert summary.pauses == [(38.0, 68.0)]
    assert known([*events[:21], *pause, *later]) == known(events)


def test_evaluations_are_counted_apart_and_make_no_range() -> None:
    events, time = [started(every=1)], 0.0
    for number in range(1, 41):
        events.append(step(number, time := time + 2.0))
        if number % 10 == 0:
            events.append(evaluation(number, time := time + 7.0, 7.0))
    # To come: after steps 50, 60, 70, 80, 90 and 100, and the final scores.
    assert evaluations_to_come(summarise(events)) == 7
    found = known(events)
    assert found.seconds == pytest.approx(60 * 2.0 + 7 * 7.0)
    assert found.low == pytest.approx(found.seconds)
    assert found.high == pytest.approx(found.seconds)


def test_after_the_last_step_only_the_scores_are_left() -> None:
    events = paced([2.0] * 99)
    assert evaluations_to_come(summarise(events)) == 2
    events.append(evaluation(100, 201.0, 3.0))
    assert evaluations_to_come(summarise(events)) == 1
    assert known(events).seconds == pytest.approx(3.0)


def test_steps_that_were_left_out_of_a_long_run_count() -> None:
    # Every tenth step was kept of the first half, every one of the second: one pace, whatever was kept.
    thinned = [step(number, 2.0 * number) for number in [*range(10, 500, 10), *range(500, 600)]]
    slower = [
        {**event, "time": event["time"] + 2.0 * max(0, 300 - event["step"])} for event in thinned
    ]
    assert known([started(1000), *thinned]).seconds == pytest.approx(401 * 2.0)
    assert known([started(1000), *slower]).low < known([started(1000), *slower]).seconds


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed"])
def test_a_run_that_ended_has_no_time_left(kind: str) -> None:
    assert (
        forecast(summarise([*paced([2.0] * 20), {"type": kind, "time": 99.0, "step": 21}])) is None
    )


def test_the_range_holds_about_four_times_in_five() -> None:
    """Runs whose pace wanders: each stretch of 20 steps a little faster or slower than the one before."""
    draw = random.Random(3)
    held = []
    for _ in range(150):
        pace, gaps = 1.0, []
        for _ in range(25):
            pace = 1.0 + 0.7 * (pace - 1.0) + draw.gauss(0, 0.05)
            gaps += [max(0.1, pace + draw.gauss(0, 0.1)) for _ in range(20)]
        done = draw.randrange(60, 400)
        found = known(paced(gaps[:done], steps=len(gaps) + 1))
        held.append(found.low <= sum(gaps[done:]) <= found.high)
    assert 0.7 <= sum(held) / len(held) <= 0.97

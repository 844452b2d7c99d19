from __future__ import annotations

from collections.abc import Callable

import pytest

from lapclip.errors import LapclipError
from lapclip.machine.other_programs import OtherPrograms
from lapclip.measure.race import Candidate, race
from lapclip.measure.timing import Timer

from .test_timing import Clock


def fail() -> str:
    raise RuntimeError("could not create a primitive\nsecond line")


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"first": 2.0, "second": 1.0}, "second"),
        ({"first": 1.02, "second": 1.0}, "first"),  # within noise the first is preferred
        ({"first": 2.0, "second": 1.02, "third": 1.0}, "second"),
    ],
)
def test_the_fastest_wins_and_the_first_among_equals(
    seconds: dict[str, float], winner: str
) -> None:
    clock = Clock()
    candidates = [Candidate(name, clock.task(spent)) for name, spent in seconds.items()]
    assert race(candidates, Timer(clock=clock)).winner == winner


@pytest.mark.parametrize(
    ("find_fault", "reason"),
    [
        (lambda: "is off by 1.0e-02 here", "quick is off by 1.0e-02 here"),
        (fail, "quick does not run here (could not create a primitive)"),
    ],
)
def test_a_candidate_that_disagrees_or_fails_does_not_count(
    find_fault: Callable[[], str | None], reason: str
) -> None:
    clock = Clock()
    candidates = [
        Candidate("slow", clock.task(2.0)),
        Candidate("quick", clock.task(1.0), find_fault),
    ]
    result = race(candidates, Timer(clock=clock))
    assert (result.winner, result.reason) == ("slow", reason)
    assert result.timings == {}
    third = Candidate("third", clock.task(1.5))
    result = race([*candidates, third], Timer(clock=clock))
    assert (result.winner, result.reason) == (
        "third",
        "1500.0 ms against 2000.0 ms slow, timed here",
    )


def test_a_race_without_a_correct_candidate_is_an_error() -> None:
    with pytest.raises(LapclipError, match="only is wrong"):
        race([Candidate("only", lambda: None, lambda: "is wrong")], Timer())


def test_a_race_beside_other_programs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    candidates = [Candidate(name, clock.task(1.0)) for name in ("one", "other")]
    assert race(candidates, Timer(clock=clock)).busy is None
    monkeypatch.setattr(OtherPrograms, "__call__", lambda self: 0.5)
    assert "50%" in str(race(candidates, Timer(clock=clock)).busy)

"""Choose the fastest of several candidates that compute the same.

A candidate counts only if its check passes. Candidates are in order of preference: the first one
that is not clearly slower than the fastest wins, so noise does not decide between equals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lapclip.errors import LapclipError, first_line
from lapclip.machine.other_programs import OtherPrograms, describe_load
from lapclip.measure.timing import MIN_SPEEDUP, Run, Timer, Timing


def pass_check() -> None:
    """Accept a candidate that is its own reference."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute something."""

    name: str
    run: Run
    """Computes it once. This is what is timed."""
    find_fault: Callable[[], str | None] = pass_check
    """Compares the candidate with a reference. Returns what is wrong, or None if they agree."""


@dataclass(frozen=True)
class RaceResult:
    """The winner of a race, and why."""

    winner: str
    timings: dict[str, Timing]
    """Time of each candidate that was timed, by name."""
    faults: dict[str, str] = field(default_factory=dict)
    """Sentence for each candidate that does not count, by name."""
    busy: str | None = None
    """Warning that other programs were busy. Such a result is not worth remembering."""

    @property
    def reason(self) -> str:
        """The winner's time beside that of the fastest other candidate, or why there was none."""
        others = {name: timing for name, timing in self.timings.items() if name != self.winner}
        if not others:
            return "; ".join(self.faults.values()) or "nothing else was timed"
        fastest_other = min(others, key=lambda name: others[name].median)
        own_timing = self.timings[self.winner]
        return f"{own_timing} against {others[fastest_other]} {fastest_other}, timed here"


def race(
    candidates: Sequence[Candidate],
    timer: Timer,
    prepare: Callable[[Mapping[str, Run]], Mapping[str, Run]] = dict,
) -> RaceResult:
    """Time the candidates that pass their checks in turns, and choose one.

    `prepare` may replace the callables before they are timed, for example by recordings of them.
    Raises LapclipError if no candidate passes.
    """
    faults = find_faults(candidates)
    runs = {
        candidate.name: candidate.run for candidate in candidates if candidate.name not in faults
    }
    if not runs:
        raise LapclipError("; ".join(faults.values()))
    if len(runs) == 1:
        return RaceResult(winner=next(iter(runs)), timings={}, faults=faults)
    other_programs = OtherPrograms()
    timings = timer.time_in_turns(prepare(runs))
    busy = describe_load(other_programs())
    return RaceResult(choose_fastest(timings), timings, faults, busy)


def find_faults(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Check every candidate, and return a sentence for each that fails."""
    faults = {}
    for candidate in candidates:
        try:
            fault = candidate.find_fault()
        except Exception as error:  # a library's own error: this machine cannot compute it
            fault = f"does not run here ({first_line(error)})"
        if fault is not None:
            faults[candidate.name] = f"{candidate.name} {fault}"
    return faults


def choose_fastest(timings: dict[str, Timing]) -> str:
    """Return the first name whose time is within noise of the fastest."""
    fastest = min(timing.median for timing in timings.values())
    return next(name for name, timing in timings.items() if timing.median <= fastest * MIN_SPEEDUP)

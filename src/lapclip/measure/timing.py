"""Time callables: synchronized, after a warm-up, several of them in turns.

In turns, because a machine that slows down (heat, other programs) then slows down for all of them.
No torch.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lapclip.errors import LapclipError
from lapclip.machine.facts import python

MIN_SPEEDUP = 1.03  # smaller differences are noise

Clock = Callable[[], float]
"""Returns seconds since some moment, as `time.perf_counter` does. Tests pass one that they move."""
Run = Callable[[], object]
"""Does once what is timed."""


def do_nothing() -> None:
    """Stand in for the synchronization of a device that has finished when a call returns."""


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs of one callable."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The run in the middle. Medians ignore the few runs that something disturbed."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The longest run minus the shortest one, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def __str__(self) -> str:
        return f"{self.median * 1e3:.1f} ms"


@dataclass(frozen=True)
class Timer:
    """How callables are timed."""

    synchronize: Callable[[], None] = do_nothing
    """Waits until the device has computed everything that was requested."""
    rounds: int = 5
    """Timed runs of each callable."""
    min_rounds: int = 1
    """Timed runs of each callable even if they take more than `max_seconds`."""
    max_seconds: float = 4.0
    """Time after which no further round begins, warm-up included."""
    warm_up_rounds: int = 1
    clock: Clock = time.perf_counter

    def time_once(self, run: Run) -> float:
        """Return the seconds of one run, from an idle device to an idle device."""
        self.synchronize()
        start = self.clock()
        run()
        self.synchronize()
        return self.clock() - start

    def time_in_turns(self, runs: Mapping[str, Run]) -> dict[str, Timing]:
        """Time each callable once per round."""
        start = self.clock()
        for _ in range(self.warm_up_rounds):
            for run in runs.values():
                self.time_once(run)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for finished_rounds in range(self.rounds):
            is_late = self.clock() - start > self.max_seconds
            if is_late and finished_rounds >= self.min_rounds:
                break
            for name, run in runs.items():
                seconds[name].append(self.time_once(run))
        return {name: Timing(tuple(runs_seconds)) for name, runs_seconds in seconds.items()}

    def time_one(self, run: Run) -> Timing:
        """Time one callable."""
        return self.time_in_turns({"": run})[""]

    def time_until(self, run: Run, is_enough: Callable[[Timing], bool]) -> Timing:
        """Time one callable without warm-up, again and again until the timing so far is enough."""
        timing = Timing((self.time_once(run),))
        while not is_enough(timing):
            timing = Timing((*timing.seconds, self.time_once(run)))
        return timing


def run_in_new_process(
    module: str, request: dict[str, Any], timeout_seconds: float = 300.0
) -> dict[str, Any]:
    """Run `python -m module REQUEST` and return its answer, both as JSON.

    For what only a new process can show, such as its peak memory.
    """
    process = subprocess.run(
        python("-m", module, json.dumps(request)),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or ["no reason given"]
        raise LapclipError(f"Measuring in a process of its own failed: {error_lines[-1][:200]}.")
    return json.loads(process.stdout.strip().splitlines()[-1])

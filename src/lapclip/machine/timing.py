"""How long something takes, where the time of a step goes, and whether other programs disturb it. No torch."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil

from lapclip.errors import LapclipError
from lapclip.machine.facts import python

PHASES = ("load", "preprocess", "transfer", "forward", "backward", "optimizer")
"""Of every step; where several ranks share it, they also wait for an "exchange", and where towers are on two devices,
that is what crosses over and the loss."""
WORTH = 1.03
"""How many times as fast something has to be to count as faster: less is noise."""
BUSY = 0.25
"""Share of the cores that other programs may use before a run is clearly slower for it."""
LOAD_SECONDS = 0.3
"""How long the use of the cores is watched."""
Clock = Callable[[], float]
"""Seconds since some moment, such as `time.perf_counter`. Tests pass a clock that they move."""
Synchronise = Callable[[], None]
"""Waits until a device has computed everything asked for: `Device.synchronise`."""


def timed(run: Callable[[], object], synchronise: Synchronise) -> float:
    """Seconds from a device at rest to a device at rest again."""
    synchronise()
    began = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - began


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    synchronise: Synchronise,
    rounds: int = 5,
    seconds: float = 4.0,
    warm_up: int = 1,
    least_rounds: int = 1,
) -> dict[str, float]:
    """The median seconds of each, taken alternately, so that a machine that drifts drifts for all.

    Ends early after `seconds`, but not before the least number of full rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            spent = timed(run, synchronise)
            if turn >= warm_up:
                times[name].append(spent)
        if turn >= warm_up + least_rounds - 1 and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(spent) for name, spent in times.items()}


def measured(step: int) -> bool:
    """Whether the phases of a step are measured: waiting for each phase to end slows a step, so only now and then."""
    return step <= 10 or step % 50 == 0


class TowerSeconds(NamedTuple):
    """Of one tower in a step, while both compute on devices of their own."""

    computed: float
    waited: float
    """For the other tower."""


class Stopwatch:
    """Seconds per phase of one step; counts nothing when it is off."""

    def __init__(self, synchronise: Synchronise, *, on: bool) -> None:
        self._synchronise = synchronise
        self._seconds: dict[str, float] | None = {name: 0.0 for name in PHASES} if on else None  # noqa: C420
        self._towers: dict[str, TowerSeconds] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._seconds is None:
            yield
            return
        start = time.perf_counter()
        yield
        self._synchronise()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def on(self) -> bool:
        return self._seconds is not None

    def add_towers(self, seconds: Mapping[str, float]) -> None:
        """Count a stretch in which towers computed at once on devices of their own: the first to end waits."""
        longest = max(seconds.values())
        for tower, computed in seconds.items():
            before = self._towers.get(tower, TowerSeconds(0.0, 0.0))
            self._towers[tower] = TowerSeconds(
                before.computed + computed, before.waited + longest - computed
            )

    @property
    def towers(self) -> dict[str, dict[str, float]] | None:
        """Seconds that each tower has computed, and waited for the other; None where they do not compute at once."""
        return (
            {tower: found._asdict() for tower, found in self._towers.items()}
            if self.on and self._towers
            else None
        )

    def discard(self) -> None:
        """Forget what was measured: the step turned out to have no phases."""
        self._seconds = None

    @property
    def seconds(self) -> dict[str, float] | None:
        """Seconds by phase, or None where they were not measured."""
        return self._seconds


class Laps:
    """Seconds of what happens once, one phase after the other: where the time of a command goes beside its steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """What has happened since the last call was this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def other_load(seconds: float = LOAD_SECONDS) -> float | None:
    """The share of all cores that others use while this process waits; None where the system does not say."""
    try:
        return psutil.cpu_percent(interval=seconds) / 100
    except (OSError, RuntimeError):
        return None


def busy_cores() -> str | None:
    """A sentence if others are at work, for whoever is about to time something."""
    share = other_load()
    if share is None or share < BUSY:
        return None
    return f"other programs use {share:.0%} of the cores, so what is timed now is off"


def free_cores(others: float, cores: int | None = None) -> int:
    """How many threads find a core of their own beside other programs, of so many, or of this computer's."""
    cores = cores or psutil.cpu_count() or 1
    return math.floor(cores * (1 - others) + 0.25)  # what they use is not exact


class OtherPrograms:
    """The share of all cores that other programs use, each time since the last answer. Does not wait.

    What this process has started is not other, nor what that has started. Windows does not say what processes used that
    have ended, and macOS says it of this one's alone; so there, one that has ended counts as other once, with all that
    it ever used.
    """

    def __init__(self) -> None:
        self._before = _seconds_of_cores()

    def __call__(self) -> float | None:
        """None where the system does not say, or where too little time has passed to tell."""
        before, now = self._before, _seconds_of_cores()
        if before is None or now is None:
            self._before = now
            return None
        if now.passed - before.passed < LOAD_SECONDS * now.cores:
            return None
        self._before = now
        return min(1.0, max(0.0, (now.others - before.others) / (now.passed - before.passed)))


class CoreSeconds(NamedTuple):
    """Seconds of all cores since the system began."""

    passed: float
    others: float
    """Of those, in which they worked for others."""
    cores: int


def _seconds_of_cores() -> CoreSeconds | None:
    try:
        cores, own = (
            psutil.cpu_times(),
            os.times(),
        )  # which macOS fills for ended children, where psutil does not
        spent = own.user + own.system + own.children_user + own.children_system
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = child.cpu_times()
                spent += times.user + times.system + times.children_user + times.children_system
        # Guests' time is part of the user's already; stolen time is another virtual machine's, which nobody can close.
        passed = sum(cores) - getattr(cores, "guest", 0.0) - getattr(cores, "guest_nice", 0.0)
        idle = cores.idle + getattr(cores, "iowait", 0.0) + getattr(cores, "steal", 0.0)
        return CoreSeconds(passed, passed - idle - spent, psutil.cpu_count() or 1)
    except Exception:  # whatever a system answers, a reading never ends a run
        return None


def in_fresh_process(
    module: str, request: dict[str, Any], timeout: float = 300.0
) -> dict[str, Any]:
    """What `python -m module` answers to a request, both as JSON: for what only a new process can show."""
    done = subprocess.run(
        python("-m", module, json.dumps(request)), capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LapclipError(f"Measuring in a process of its own failed: {last[:200]}.")
    return json.loads(done.stdout.strip().splitlines()[-1])

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lapclip.machine import other_programs
from lapclip.machine.polite import EVERY, MachineReader, PolitePauses, Reading

REAL_OTHERS = other_programs.OtherPrograms.__call__  # which tests are spared
QUIET = Reading(battery_percent=None, throttled=None, swap_bytes=0, others=0.0)


class Machine:
    """A machine whose readings are set by hand, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now, self.time = QUIET, 0.0
        self.pauses = PolitePauses(30, lambda: self.now, lambda: self.time)

    def later(self, **changes: object) -> str | None:
        self.now = replace(QUIET, **changes)  # type: ignore[arg-type]
        self.time += EVERY
        return self.pauses.reason()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"battery_percent": 12.0}, "on battery, 12 % left"),
        ({"throttled": True}, "the processor is held back because of heat"),
        ({"swap_bytes": 10**9}, "memory is short, the system swaps"),
        ({"others": 0.6}, "other programs use 60% of the cores"),
    ],
)
def test_a_need_that_lasts_pauses_and_one_that_is_over_goes_on(changes: dict, reason: str) -> None:
    machine = Machine()
    assert machine.later() is None
    assert machine.later(**changes) is None  # a moment is nobody's need
    assert machine.later(**changes) == reason
    assert machine.later() == reason
    assert machine.later() is None


@pytest.mark.parametrize(
    "changes",
    [{"battery_percent": 30.0}, {"throttled": False}, {"swap_bytes": 10**8}, {"others": 0.1}],
)
def test_small_things_do_not_pause(changes: dict) -> None:
    machine = Machine()
    assert [machine.later(**changes) for _ in range(4)] == [None] * 4


def test_between_two_readings_nothing_is_asked() -> None:
    machine = Machine()
    machine.later(others=0.9)
    machine.later(others=0.9)
    machine.now = QUIET
    assert machine.pauses.reason() == "other programs use 90% of the cores"


def test_a_load_that_comes_and_goes_does_not_pause() -> None:
    machine = Machine()
    assert {machine.later(others=share) for share in (0.9, 0.0, 0.9, 0.0, 0.9, 0.0)} == {None}


def test_this_machine_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_programs.OtherPrograms, "__call__", REAL_OTHERS)
    read = MachineReader()
    monkeypatch.setattr(other_programs, "WATCH_SECONDS", 0.02)
    time.sleep(0.1)
    reading = read()
    assert reading.others is not None
    assert 0 <= reading.others <= 1
    assert reading.swap_bytes >= 0


def test_swap_that_has_grown_and_stays_lets_a_run_go_on() -> None:
    machine = Machine()
    reasons = [machine.later(swap_bytes=10**9) for _ in range(20)]
    assert reasons[1] == "memory is short, the system swaps"
    assert reasons[-1] is None

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from lapclip.machine.polite import READING_SECONDS, MachineReader, PolitePauses, Reading

QUIET = Reading(battery_percent=None, throttled=None, swap_bytes=0)


class Machine:
    """A machine whose readings are set by hand, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now, self.time = QUIET, 0.0
        self.pauses = PolitePauses(30, lambda: self.now, lambda: self.time)

    def later(self, **changes: object) -> str | None:
        self.now = replace(QUIET, **changes)  # type: ignore[arg-type]
        self.time += READING_SECONDS
        return self.pauses.reason()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"battery_percent": 12.0}, "on battery, 12 % left"),
        ({"throttled": True}, "the processor is held back because of heat"),
        ({"swap_bytes": 10**9}, "memory is short, the system swaps"),
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
    [{"battery_percent": 30.0}, {"throttled": False}, {"swap_bytes": 10**8}],
)
def test_small_things_do_not_pause(changes: dict) -> None:
    machine = Machine()
    assert [machine.later(**changes) for _ in range(4)] == [None] * 4


def test_between_two_readings_nothing_is_asked() -> None:
    machine = Machine()
    machine.later(throttled=True)
    machine.later(throttled=True)
    machine.now = QUIET
    assert machine.pauses.reason() == "the processor is held back because of heat"


def test_heat_that_comes_and_goes_does_not_pause() -> None:
    machine = Machine()
    assert {machine.later(throttled=hot) for hot in (True, False) * 3} == {None}


def test_swap_that_has_grown_and_stays_lets_a_run_go_on() -> None:
    machine = Machine()
    reasons = [machine.later(swap_bytes=10**9) for _ in range(20)]
    assert reasons[1] == "memory is short, the system swaps"
    assert reasons[-1] is None


def test_this_machine_can_be_read() -> None:
    assert MachineReader()().swap_bytes >= 0


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX numbers")
def test_the_priority_of_every_thread_is_lowered() -> None:
    code = """if True:
        import os, threading
        from lapclip.machine.polite import lower_priority
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        assert lower_priority() and lower_priority()
        print({os.getpriority(os.PRIO_PROCESS, at) for at in (0, thread.native_id)})
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if sys.platform == "linux":
        assert done.stdout == "{10}\n"

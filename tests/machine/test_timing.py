from __future__ import annotations

import psutil
import pytest

from lapclip.errors import LapclipError
from lapclip.machine import timing

REAL_LOAD = timing.other_load  # the tests of a session take other programs for absent


def test_turns_alternate_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([100.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0])
    monkeypatch.setattr(timing, "timed", lambda run, _: (run(), next(clock))[1])
    found = timing.in_turns({"a": lambda: order.append("a")}, lambda: None, rounds=6)
    assert found == {"a": 4.0}
    monkeypatch.setattr(timing, "timed", lambda run, _: (run(), 1.0)[1])
    order.clear()
    timing.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, lambda: None, rounds=2)
    assert order == ["a", "b"] * 3


def test_turns_end_early_but_not_before_the_rounds_that_are_needed() -> None:
    order: list[str] = []
    timing.in_turns({"a": lambda: order.append("a")}, lambda: None, rounds=9, seconds=0.0, least_rounds=2)
    assert len(order) == 3
    order.clear()
    timing.in_turns({"a": lambda: order.append("a")}, lambda: None, rounds=9, seconds=0.0, warm_up=0)
    assert len(order) == 1


def test_the_share_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 40.0)
    assert REAL_LOAD() == 0.4


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(interval: float) -> float:
        raise OSError

    monkeypatch.setattr(psutil, "cpu_percent", refuses)
    assert REAL_LOAD() is None
    monkeypatch.setattr(timing, "other_load", REAL_LOAD)
    assert timing.busy_cores() is None


@pytest.mark.parametrize(("share", "text"), [(0.0, None), (0.24, None), (0.6, "other programs use 60% of the cores")])
def test_busy_cores_are_named(share: float, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "other_load", lambda: share)
    assert (timing.busy_cores() or "").startswith(text or "")
    assert (timing.busy_cores() is None) == (text is None)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(LapclipError, match="KeyError"):
        timing.in_fresh_process("lapclip.microscope.device_speed", {})

from __future__ import annotations

import pytest

from lapclip.machine import timing


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

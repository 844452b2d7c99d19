from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from lapclip.errors import LapclipError
from lapclip.machine import timing

REAL_LOAD, REAL_OTHERS = timing.other_load, timing.OtherPrograms.__call__
"""The tests of a session take other programs for absent."""


def test_turns_alternate_and_the_first_round_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    clock = iter([100.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0])
    monkeypatch.setattr(timing, "timed", lambda run, _: (run(), next(clock))[1])
    found = timing.in_turns({"a": lambda: order.append("a")}, lambda: None, rounds=6)
    assert found == {"a": 4.0}
    monkeypatch.setattr(timing, "timed", lambda run, _: (run(), 1.0)[1])
    order.clear()
    timing.in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, lambda: None, rounds=2
    )
    assert order == ["a", "b"] * 3


def test_turns_end_early_but_not_before_the_rounds_that_are_needed() -> None:
    order: list[str] = []
    timing.in_turns(
        {"a": lambda: order.append("a")}, lambda: None, rounds=9, seconds=0.0, least_rounds=2
    )
    assert len(order) == 3
    order.clear()
    timing.in_turns(
        {"a": lambda: order.append("a")}, lambda: None, rounds=9, seconds=0.0, warm_up=0
    )
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


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, None), (0.24, None), (0.6, "other programs use 60% of the cores")]
)
def test_busy_cores_are_named(
    share: float, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "other_load", lambda: share)
    assert (timing.busy_cores() or "").startswith(text or "")
    assert (timing.busy_cores() is None) == (text is None)


def test_what_others_use_is_told_from_what_this_process_and_its_children_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = SimpleNamespace(user=100.0, system=50.0, idle=1000.0)
    own = SimpleNamespace(user=10.0, system=0.0, children_user=0.0, children_system=0.0)
    children: list[SimpleNamespace] = []
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: tuple_of(cores))
    monkeypatch.setattr(timing.os, "times", lambda: own)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: children)
    others = timing.OtherPrograms()
    assert REAL_OTHERS(others) is None  # no time has passed
    cores.user, cores.idle, own.user, own.children_user = 114.0, 1006.0, 13.0, 2.0
    children += [
        SimpleNamespace(cpu_times=lambda: SimpleNamespace(**{**vars(own), "user": 1.0})),
        gone(),
    ]
    assert REAL_OTHERS(others) == pytest.approx(
        0.3
    )  # 20 seconds, 14 of them busy, 8 for this process and its children
    cores.idle += 10.0
    assert REAL_OTHERS(others) == 0.0


@pytest.mark.parametrize(
    ("share", "cores", "threads"),
    [(0.5, 2, 1), (0.52, 2, 1), (0.3, 8, 5), (1.0, 4, 0), (0.7, 2, 0), (0.0, 4, 4)],
)
def test_threads_that_find_a_core_beside_others(share: float, cores: int, threads: int) -> None:
    assert timing.free_cores(share, cores) == threads


def gone() -> SimpleNamespace:
    def cpu_times() -> None:
        raise psutil.NoSuchProcess(1)

    return SimpleNamespace(cpu_times=cpu_times)


def tuple_of(times: SimpleNamespace) -> tuple:
    return namedtuple("Times", vars(times))(**vars(times))


def test_a_system_that_hides_its_cores_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ValueError("proc")

    for owner, name in (
        (psutil, "cpu_times"),
        (psutil.Process, "children"),
        (psutil, "Process"),
        (timing.os, "times"),
    ):
        others = timing.OtherPrograms()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuses)
            assert REAL_OTHERS(others) is None
            assert REAL_OTHERS(timing.OtherPrograms()) is None


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(LapclipError, match="KeyError"):
        timing.in_fresh_process("lapclip.microscope.device_speed", {})

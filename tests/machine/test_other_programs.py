from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from lapclip.machine import other_programs

REAL_LOAD, REAL_OTHERS = other_programs.read_load, other_programs.OtherPrograms.__call__
"""The tests of a session take other programs for absent."""


def test_the_share_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 40.0)
    assert REAL_LOAD() == 0.4


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(interval: float) -> float:
        raise OSError

    monkeypatch.setattr(psutil, "cpu_percent", refuses)
    assert REAL_LOAD() is None
    monkeypatch.setattr(other_programs, "read_load", REAL_LOAD)
    assert other_programs.describe_busy_cores() is None


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, None), (0.24, None), (0.6, "other programs use 60% of the cores")]
)
def test_busy_cores_are_named(
    share: float, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_programs, "read_load", lambda: share)
    assert (other_programs.describe_busy_cores() or "").startswith(text or "")
    assert (other_programs.describe_busy_cores() is None) == (text is None)


def test_what_others_use_is_told_from_what_this_process_and_its_children_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = SimpleNamespace(user=100.0, system=50.0, idle=1000.0)
    own = SimpleNamespace(user=10.0, system=0.0, children_user=0.0, children_system=0.0)
    children: list[SimpleNamespace] = []
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: tuple_of(cores))
    monkeypatch.setattr(other_programs.os, "times", lambda: own)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: children)
    others = other_programs.OtherPrograms()
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
    assert other_programs.count_free_cores(share, cores) == threads


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
        (other_programs.os, "times"),
    ):
        others = other_programs.OtherPrograms()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuses)
            assert REAL_OTHERS(others) is None
            assert REAL_OTHERS(other_programs.OtherPrograms()) is None

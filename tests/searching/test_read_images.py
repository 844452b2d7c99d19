from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from lapclip.searching import read_images
from lapclip.searching.read_images import made_ahead


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lapclip-reading")]


def test_results_come_in_order_and_never_further_ahead_than_asked() -> None:
    started: list[int] = []
    for at, made in enumerate(
        made_ahead(lambda item: started.append(item) or item * 2, range(50), 5, 3)
    ):
        assert made == 2 * at
        assert len(started) <= at + 5
    assert sorted(started) == list(range(50))


def test_an_error_reaches_whoever_wants_the_result_and_ends_the_threads() -> None:
    def make(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        return item

    results = made_ahead(make, range(100), 4, 2)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)
    for thread in reading():
        thread.join(30)
        assert not thread.is_alive()


def test_whoever_stops_does_not_wait_for_an_image_that_is_being_read() -> None:
    """Neither now nor when the process ends: a daemon is not joined then."""
    begun, release = threading.Event(), threading.Event()
    results = made_ahead(lambda item: item == 0 or (begun.set(), release.wait(300)), range(9), 4, 1)
    next(results)
    assert begun.wait(30)
    began = time.monotonic()
    results.close()  # type: ignore[attr-defined]  # a generator
    assert time.monotonic() - began < 60
    (thread,) = reading()
    assert thread.daemon
    release.set()
    thread.join(30)  # what else was asked for is not begun
    assert not thread.is_alive()


def test_threads_are_added_while_results_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of its own: each look at it takes a second, so half of the time is spent waiting."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(read_images, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    together, most, gate = [0], [0], threading.Lock()
    met = threading.Event()

    def make(item: int) -> int:
        with gate:
            together[0] += 1
            most[0] = max(most[0], together[0])
            if together[0] == 3:
                met.set()
        if item >= 20:
            met.wait(30)  # until three are here at once
        with gate:
            together[0] -= 1
        return item

    assert list(made_ahead(make, range(40), 10, 3)) == list(range(40))
    assert most[0] == 3
    assert met.is_set()

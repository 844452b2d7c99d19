from __future__ import annotations

import pytest

from lapclip.machine import facts, swap

GIB = 1 << 30


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine of 8 GiB whose figures can be set; every look counts."""
    figures = {"swap": 1 * GIB, "held": 2 * GIB}
    monkeypatch.setattr(swap, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(facts, "total_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(facts, "swap_bytes", lambda: figures["swap"])
    monkeypatch.setattr(facts, "held_bytes", lambda: figures["held"])
    return figures


def test_swap_that_grows_with_the_process_is_found_once(system: dict[str, int]) -> None:
    watch = swap.SwapWatch()
    assert watch.grown() is None
    system.update(swap=3 * GIB, held=4 * GIB)
    assert watch.grown() == 2 * GIB
    assert watch.grown() is None
    system.update(swap=5 * GIB, held=6 * GIB)
    assert watch.grown() == 2 * GIB


@pytest.mark.parametrize(("grown", "held"), [(GIB // 2, 6 * GIB), (3 * GIB, 0), (3 * GIB, GIB)])
def test_little_swap_and_the_swap_of_others_do_not_count(system: dict[str, int], grown: int, held: int) -> None:
    watch = swap.SwapWatch()
    system["swap"] += grown
    system["held"] += held
    assert watch.grown() is None


def test_on_a_large_machine_a_tenth_of_memory_counts(system: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "total_bytes", lambda: 64 * GIB)
    watch = swap.SwapWatch()
    system.update(swap=6 * GIB, held=60 * GIB)
    assert watch.grown() is None
    system["swap"] = 8 * GIB
    assert watch.grown() == 7 * GIB


def test_the_system_is_asked_at_most_every_few_seconds(system: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(swap, "EVERY_SECONDS", 5.0)
    monkeypatch.setattr(swap.time, "monotonic", lambda: now[0])
    watch = swap.SwapWatch()
    system.update(swap=5 * GIB, held=9 * GIB)
    now[0] = 104.0
    assert watch.grown() is None
    now[0] = 105.0
    assert watch.grown() == 4 * GIB


def test_real_figures_can_be_read() -> None:
    assert facts.swap_bytes() >= 0
    assert facts.held_bytes() > 10_000_000
    assert 0 < facts.available_bytes() <= facts.total_bytes()

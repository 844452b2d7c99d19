from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.machine import system_memory

GIB = 1 << 30


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine of 8 GiB whose memory can be set; every reading counts."""
    held = {"swap": 1 * GIB, "held": 2 * GIB}
    monkeypatch.setattr(system_memory, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(system_memory, "total_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(system_memory, "swap_bytes", lambda: held["swap"])
    monkeypatch.setattr(system_memory, "held_bytes", lambda: held["held"])
    return held


def test_swap_that_grows_with_the_process_is_found_once(system: dict[str, int]) -> None:
    watch = system_memory.SwapWatch()
    assert watch.grown() is None
    system.update(swap=3 * GIB, held=4 * GIB)
    assert watch.grown() == 2 * GIB
    assert watch.grown() is None
    system.update(swap=5 * GIB, held=6 * GIB)
    assert watch.grown() == 2 * GIB


@pytest.mark.parametrize(("grown", "held"), [(GIB // 2, 6 * GIB), (3 * GIB, 0), (3 * GIB, GIB)])
def test_little_swap_and_the_swap_of_others_do_not_count(
    system: dict[str, int], grown: int, held: int
) -> None:
    watch = system_memory.SwapWatch()
    system["swap"] += grown
    system["held"] += held
    assert watch.grown() is None


def test_on_a_large_machine_a_tenth_of_memory_counts(
    system: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_memory, "total_bytes", lambda: 64 * GIB)
    watch = system_memory.SwapWatch()
    system.update(swap=6 * GIB, held=60 * GIB)
    assert watch.grown() is None
    system["swap"] = 8 * GIB
    assert watch.grown() == 7 * GIB


def test_the_system_is_asked_at_most_every_few_seconds(
    system: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(system_memory, "EVERY_SECONDS", 5.0)
    monkeypatch.setattr(system_memory.time, "monotonic", lambda: now[0])
    watch = system_memory.SwapWatch()
    system.update(swap=5 * GIB, held=9 * GIB)
    now[0] = 104.0
    assert watch.grown() is None
    now[0] = 105.0
    assert watch.grown() == 4 * GIB


def test_real_held_can_be_read() -> None:
    assert system_memory.swap_bytes() >= 0
    assert system_memory.held_bytes() > 10_000_000
    assert 0 < system_memory.available_bytes() <= system_memory.total_bytes()


def test_peak_memory_is_at_least_what_is_held_now() -> None:
    assert system_memory.peak_memory_bytes() > 0.5 * system_memory.memory_bytes() > 1e6


def test_a_container_limits_memory(tmp_path: Path) -> None:
    assert system_memory.container_room(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert system_memory.container_room(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("5000\n")
    assert system_memory.container_room(tmp_path) == 4000

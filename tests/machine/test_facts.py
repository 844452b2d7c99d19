from __future__ import annotations

from pathlib import Path

import pytest

from lapclip import paths
from lapclip.machine import facts
from lapclip.machine.devices import Device, choose_device


def test_facts_are_there() -> None:
    found = facts.machine_facts()
    assert found["chip"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28


def test_peak_memory_is_at_least_what_is_held_now() -> None:
    assert facts.peak_memory_bytes() > 0.5 * facts.memory_bytes() > 1e6


def test_the_cache_goes_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPCLIP_CACHE", "here")
    assert paths.cache_folder() == Path("here")
    monkeypatch.delenv("LAPCLIP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert paths.cache_folder() == Path("there/lapclip")


def test_the_cpu_can_always_be_asked_for() -> None:
    device, reason = choose_device("cpu")
    assert device == Device("cpu")
    assert reason == "asked for"
    device.synchronise()
    assert device.peak_memory_bytes() > 0


def test_auto_says_why() -> None:
    assert choose_device("auto")[1]

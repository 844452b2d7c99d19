from __future__ import annotations

from typing import Any

import pytest

from lapclip.machine.overview import Check, canary_check, checks

GOOD: dict[str, Any] = {
    "python": "3.12.4",
    "system": "Linux 6.8",
    "torch": {"version": "2.13.0", "accelerator": "cuda"},
    "memory_free_bytes": 6 * 10**9,
    "disk_free_bytes": 50 * 10**9,
    "power_source": "mains",
    "battery_percent": 90.0,
    "low_power_mode": False,
    "load": 0.04,
    "swap_used_bytes": 0,
    "throttled": False,
    "celsius": 48.0,
    "accelerators": [{"kind": "cuda", "name": "A GPU"}],
}


def found(**changes: Any) -> dict[str, Check]:
    return {check.name: check for check in checks({**GOOD, **changes})}


def test_a_good_machine_passes_everything() -> None:
    assert [check for check in found().values() if not check.ok] == []


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"python": "3.9.1"}, "python", "needs 3.11"),
        ({"torch": None}, "torch", "not installed"),
        ({"torch": {"version": "2.9.1+cpu", "accelerator": None}}, "torch", "needs 2.11"),
        (
            {"system": "Darwin 24", "torch": {"version": "2.12.0", "accelerator": None}},
            "torch",
            "needs 2.13",
        ),
        (
            {"memory_free_bytes": 6 * 10**8},
            "memory",
            "0.6 GB free; the default recipe takes about 1 GB",
        ),
        ({"disk_free_bytes": 10**8}, "disk", "0.1 GB free"),
        ({"power_source": "battery", "battery_percent": 31.0}, "power", "on battery (31 % left)"),
        ({"low_power_mode": True}, "low-power mode", "held back"),
        ({"load": 0.8}, "other load", "80% of the cores"),
        ({"swap_used_bytes": 3 * 10**9}, "swap", "3.0 GB in use: memory is short"),
        ({"throttled": True, "celsius": 98.2}, "throttling", "because of heat at 98 C"),
        (
            {"torch": {"version": "2.13.0", "accelerator": None}},
            "accelerator",
            "this build of torch cannot use it",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], name: str, words: str) -> None:
    check = found(**changes)[name]
    assert check.ok is False
    assert words in check.text


@pytest.mark.parametrize(
    ("fact", "name"),
    [
        ("disk_free_bytes", "disk"),
        ("power_source", "power"),
        ("low_power_mode", "low-power mode"),
        ("load", "other load"),
        ("swap_used_bytes", "swap"),
        ("throttled", "throttling"),
    ],
)
def test_what_is_unknown_says_so(fact: str, name: str) -> None:
    check = found(**{fact: None})[name]
    assert check.ok is None
    assert "unknown" in check.text


def test_a_canary_that_fails_names_what_failed() -> None:
    assert canary_check("mps", 52, []).ok is True
    failed = canary_check("mps", 52, ["layer norm, float16: off by 3.0e-01, tolerance 5e-03"])
    assert failed.ok is False
    assert "1 of 52 checks fail: layer norm, float16" in failed.text

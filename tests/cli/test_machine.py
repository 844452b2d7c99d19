"""`lapclip machine`, as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lapclip.cli.machine import _cores, _torch, rows

from ..conftest import lapclip

NO_TORCH = """
import importlib.abc, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, NoTorch())
from lapclip.cli import main
main({arguments!r})
"""
CHECKS = [
    "python",
    "torch",
    "memory",
    "disk",
    "power",
    "low-power mode",
    "other load",
    "swap",
    "throttling",
]


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = NO_TORCH.format(arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )


def test_json_keeps_the_contract(here: Path) -> None:
    done = lapclip("machine", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"chip", "cores", "memory_bytes", "accelerators", "checks"} <= found.keys()
    assert isinstance(found["cores"], int)
    assert found["memory_bytes"] > 2**28
    assert found["memory_free_bytes"] <= found["memory_bytes"]
    assert found["torch"]["threads"] >= 1
    assert [check["name"] for check in found["checks"]][: len(CHECKS)] == CHECKS
    for check in found["checks"]:
        assert check.keys() == {"name", "ok", "text"}
        assert check["ok"] in (True, False, None)
        assert check["text"]
    assert "unknown" not in json.dumps([value for name, value in found.items() if name != "checks"])


def test_a_person_gets_every_fact_and_the_next_command(here: Path) -> None:
    done = lapclip("machine")
    assert done.returncode == 0, done.stderr
    for word in (
        "cores",
        "memory",
        "swap",
        "disk",
        "power",
        "heat",
        "energy",
        "torch",
        "accelerator",
    ):
        assert f"\n  {word} " in done.stdout
    for name in CHECKS:
        assert f"  {name} " in done.stdout.partition("checks")[2]
    assert done.stdout.rstrip().endswith("lapclip train")
    assert "None" not in done.stdout


def test_it_works_where_torch_is_not_installed(here: Path) -> None:
    done = without_torch("machine", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"] is None
    (check,) = (check for check in found["checks"] if check["name"] == "torch")
    assert check["ok"] is False
    assert "not installed" in check["text"]
    for_people = without_torch("machine")
    assert for_people.returncode == 0, for_people.stderr
    assert "torch         not installed" in for_people.stdout


def test_facts_that_nobody_knows_are_called_unknown() -> None:
    nothing = dict.fromkeys(
        [
            "swap_bytes",
            "swap_used_bytes",
            "disk_free_bytes",
            "power_source",
            "battery_percent",
            "low_power_mode",
            "celsius",
            "megahertz",
            "watts",
            "energy_reason",
            "torch",
            "physical_cores",
        ]
    )
    known = {
        "cores": 4,
        "usable_cores": 2,
        "memory_bytes": 8e9,
        "memory_free_bytes": 1e9,
        "system": "Linux",
    }
    bare = {
        "kind": "xpu",
        "name": "a GPU",
        "memory_bytes": None,
        "free_bytes": None,
        "shares_memory": None,
    }
    told = dict(
        rows(
            {
                **nothing,
                **known,
                "architecture": "arm",
                "python": "3.11",
                "accelerators": [{**bare, "driver": None}],
            }
        )
    )
    assert told["cores"] == "unknown, 4 threads, 2 usable here"
    assert told["heat"] == "unknown, clock unknown"
    assert told["power"] == "source unknown, no battery seen, low-power mode unknown"
    assert told["torch"] == "not installed"
    assert told["accelerator"] == "a GPU (xpu), memory unknown, driver unknown"
    assert not any("None" in text for text in told.values())


def test_one_thread_is_one_thread() -> None:
    build = {"version": "2", "cuda": None, "hip": None, "threads": 1, "vectors": "AVX2"}
    assert "1 thread," in _torch(build)
    cores = {
        "physical_cores": 1,
        "cores": 1,
        "usable_cores": 1,
    }
    assert _cores(cores).endswith("1 thread")

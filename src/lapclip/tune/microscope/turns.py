"""How the microscope times: warmed up, waited for, and in turns, so that a machine that drifts drifts for all."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lapclip.errors import LapclipError
from lapclip.machine.devices import Device

Notice = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and what comes next."""


def in_turns(
    runs: Mapping[str, Callable[[], object]], device: Device, rounds: int = 5, seconds: float = 4.0, warm_up: int = 1
) -> dict[str, float]:
    """The median seconds of each, taken alternately. Ends early, but not before one full round, after `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            spent = timed(run, device)
            if turn >= warm_up:
                times[name].append(spent)
        if turn >= warm_up and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(spent) for name, spent in times.items()}


def timed(run: Callable[[], object], device: Device) -> float:
    """Seconds from a device at rest to a device at rest again."""
    device.synchronise()
    start = time.perf_counter()
    run()
    device.synchronise()
    return time.perf_counter() - start


def in_fresh_process(module: str, request: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
    """What `python -m module` answers to a request, both as JSON: for what only a young process can tell."""
    command = [sys.executable, "-m", module, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LapclipError(f"Measuring in a process of its own failed: {last[:200]}.")
    return json.loads(done.stdout.strip().splitlines()[-1])

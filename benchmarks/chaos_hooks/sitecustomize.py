"""What benchmarks/chaos.py puts into the processes it starts: a clock that jumps, and a machine that looks hot.

Python imports a module of this name before any other. Files in the folder CHAOS_SIGNALS say what is to happen: `clock`
holds the seconds by which the clock is wrong, and a polite run pauses while there is a file `hot`.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

SIGNALS = os.environ.get("CHAOS_SIGNALS", "")
_time, _time_ns = time.time, time.time_ns


def _shift() -> float:
    try:
        with open(os.path.join(SIGNALS, "clock"), encoding="utf-8") as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0


class PoliteFinder:
    """Lets a polite run look often, and see what the driver wants it to see."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "lapclip.machine.polite":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.READING_SECONDS, module.AGREEING_READINGS = 0.05, 1
                module.MachineReader = lambda: (
                    lambda: module.Reading(None, os.path.exists(os.path.join(SIGNALS, "hot")), 0)
                )

            spec.loader.exec_module = exec_module
        return spec


if SIGNALS:
    time.time = lambda: _time() + _shift()
    time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
    sys.meta_path.insert(0, PoliteFinder())  # type: ignore[arg-type]

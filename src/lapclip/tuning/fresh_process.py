"""Measurements in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from lapclip.errors import LapclipError


def in_fresh_process(module: str, request: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
    """What `python -m module` answers to a request, both as JSON: for what only a young process can tell."""
    command = [sys.executable, "-m", module, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LapclipError(f"Measuring in a process of its own failed: {last[:200]}.")
    return json.loads(done.stdout.strip().splitlines()[-1])

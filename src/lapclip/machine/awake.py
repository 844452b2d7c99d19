"""Keep the machine from sleeping while something works. No torch.

macOS: `caffeinate`. Linux: `systemd-inhibit`. Windows: SetThreadExecutionState. None of them needs rights, and where
they are missing nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONTINUOUS, _SYSTEM_REQUIRED = 0x80000000, 0x00000001  # winbase.h


@contextmanager
def kept_awake(*, wanted: bool = True) -> Iterator[bool]:
    """Whether the system was asked to stay awake; it is let go at the end, also if this process is killed."""
    if wanted and sys.platform == "win32":
        with _windows() as kept:
            yield kept
        return
    command = guard_command() if wanted else None
    guard = None
    if command:
        quiet = subprocess.DEVNULL
        with suppress(OSError):
            guard = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield guard is not None and guard.poll() is None
    finally:
        if guard is not None:
            guard.terminate()
            guard.wait()


def guard_command() -> list[str] | None:
    """A program that keeps the machine awake for as long as it and this process run."""
    if sys.platform == "darwin" and shutil.which("caffeinate"):
        return ["caffeinate", "-i", "-w", str(os.getpid())]
    if sys.platform == "linux" and shutil.which("systemd-inhibit") and shutil.which("tail"):
        # `tail --pid` ends with this process, and the inhibition with it.
        wait = ["tail", "--follow", "/dev/null", f"--pid={os.getpid()}"]
        return ["systemd-inhibit", "--what=sleep:idle", "--who=lapclip", "--why=training", "--mode=block", *wait]
    return None


@contextmanager
def _windows() -> Iterator[bool]:
    """The wish belongs to the thread, so the system forgets it when the process ends."""
    ask = ctypes.windll.kernel32.SetThreadExecutionState  # type: ignore[attr-defined]
    kept = bool(ask(_CONTINUOUS | _SYSTEM_REQUIRED))
    try:
        yield kept
    finally:
        ask(_CONTINUOUS)

"""A long run and the desktop: it stays awake, and stops when asked to. No torch.

Awake: `caffeinate` on macOS, `systemd-inhibit` on Linux, SetThreadExecutionState on Windows. None of them needs rights,
and where they are missing nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lapclip.machine.facts import program

_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
_CONTINUOUS, _SYSTEM_REQUIRED = 0x80000000, 0x00000001  # winbase.h


@contextmanager
def kept_awake(*, wanted: bool = True) -> Iterator[bool]:
    """Whether the system was asked to stay awake; it is let go at the end, also if this process is killed."""
    if wanted and sys.platform == "win32":
        with _windows() as awake:
            yield awake
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
    if sys.platform == "darwin" and (caffeinate := program("caffeinate")):
        return [caffeinate, "-i", "-w", str(os.getpid())]
    if (
        sys.platform == "linux"
        and (inhibit := program("systemd-inhibit"))
        and (tail := program("tail"))
    ):
        # `tail --pid` ends with this process, and the inhibition with it.
        wait = [tail, "--follow", "/dev/null", f"--pid={os.getpid()}"]
        return [
            inhibit,
            "--what=sleep:idle",
            "--who=lapclip",
            "--why=training",
            "--mode=block",
            *wait,
        ]
    return None


@contextmanager
def _windows() -> Iterator[bool]:
    """The wish belongs to the thread, so the system forgets it when the process ends."""
    ask = ctypes.windll.kernel32.SetThreadExecutionState  # type: ignore[attr-defined]
    awake = bool(ask(_CONTINUOUS | _SYSTEM_REQUIRED))
    try:
        yield awake
    finally:
        ask(_CONTINUOUS)


@contextmanager
def ends_in_order() -> Iterator[None]:
    """While something is half-made, SIGTERM ends this process as Ctrl-C does, so that nothing of it is left behind.

    Only where nobody else listens for it, and in the main thread, which alone may.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Signals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop; a second SIGINT interrupts at once.

    SIGHUP means that the terminal was closed. A process that ignores it, as under nohup, continues to ignore it.

    `twice` is for torchrun's processes, which it does not interrupt: Ctrl-C reaches them from the terminal, and once
    more from torchrun, which itself ends those that take longer than half a minute.
    """

    def __init__(self, *, twice: bool = False) -> None:
        self.received: int | None = None
        self._twice = twice
        self._before: dict[int, Any] = {}

    def reason(self) -> str | None:
        return signal.Signals(self.received).name if self.received else None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if _HANGUP is not None and signal.getsignal(_HANGUP) != signal.SIG_IGN:
                numbers.append(_HANGUP)
            for number in numbers:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.received and number == signal.SIGINT and not self._twice:
            raise KeyboardInterrupt
        if number == _HANGUP:
            _drop_terminal()
        self.received = number


def _drop_terminal() -> None:
    """Send output to nowhere, because writing to a closed terminal fails. Output into files continues."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)

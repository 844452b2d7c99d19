"""The terminal that is written to: what it understands, and how it is left."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GONE = (errno.EPIPE, errno.EIO, errno.EINVAL)
"""What writing to a reader or a terminal that went away says; the last on Windows."""


def can_draw() -> bool:
    """Whether standard output is a terminal that understands cursor movements."""
    if not sys.stdout.isatty():
        return False
    if sys.platform == "win32":
        return _windows_understands()
    return os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _windows_understands() -> bool:
    """Ask a Windows console for escape sequences; older ones refuse."""
    if sys.platform != "win32":
        return True
    import ctypes

    kernel = ctypes.windll.kernel32
    handle, mode = kernel.GetStdHandle(-11), ctypes.c_uint32()
    return bool(kernel.GetConsoleMode(handle, ctypes.byref(mode)) and kernel.SetConsoleMode(handle, mode.value | 4))


def forgive_characters() -> None:
    """A name with a letter that this terminal cannot show must not end the command."""
    with suppress(AttributeError, ValueError, OSError):
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def ending_well(suspend: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Being told to end is an ending like any other: the terminal is restored on the way out."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {"SIGTERM": end, "SIGHUP": end, "SIGTSTP": suspend}
    before = {}
    for name, handler in handlers.items():
        if hasattr(signal, name):
            number = getattr(signal, name)
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet_end(interrupted: int) -> Iterator[list[int]]:
    """Ctrl-C and a reader that went away end the command without a word."""
    status = [0]
    try:
        yield status
    except KeyboardInterrupt:
        status[0] = interrupted
    except OSError as error:
        if error.errno not in GONE:
            raise
        # What is still to be written goes nowhere, or Python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

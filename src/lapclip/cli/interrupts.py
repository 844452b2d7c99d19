"""Ctrl-C and SIGTERM, from the first moment of a process to its last.

Python raises KeyboardInterrupt wherever it is, also in the middle of an import: that leaves half a module behind, or
aborts in a library that knows no way back from there. So while something is imported, before a command begins and when
it is over, the process ends at once and without a word; nothing is at stake then. In between, KeyboardInterrupt is
raised, which commands turn into a word that fits. Only what is needed for this is imported here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"
_SHOW_CURSOR = b"\x1b[?25h"
_process = os.getpid()
_received = signal.SIGINT
_in_command = False


def install() -> None:
    """Take over both signals, and keep the current folder off the path of every Python that this process starts."""
    # Also where a library starts it, as torch does for compiling and `multiprocessing` for workers.
    os.environ["PYTHONSAFEPATH"] = "1"
    for number in (signal.SIGINT, signal.SIGTERM):
        if (
            signal.getsignal(number) is not signal.SIG_IGN
        ):  # as a shell arranges it for what is not to be interrupted
            signal.signal(number, _receive)


@contextmanager
def in_command() -> Iterator[None]:
    """A command is at work, and may be interrupted by an exception."""
    global _in_command, _received
    _in_command, _received = True, signal.SIGINT
    try:
        yield
    finally:
        _in_command = False


def exit_status() -> int:
    """The status of a process that was interrupted: 128 and the signal."""
    return 128 + _received


def _receive(number: int, frame: FrameType | None) -> None:
    global _received
    _received = signal.Signals(number)
    if (
        not _in_command or _is_importing(frame) or os.getpid() != _process
    ):  # the last: a worker that was forked off
        if os.name != "nt" and os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
        os._exit(exit_status())
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False

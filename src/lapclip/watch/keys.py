"""Keys as they are pressed, without Enter, on POSIX and on Windows. The terminal is given back as it was."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType

QUIT, NEXT, PREVIOUS, DOWN, UP = "quit", "next", "previous", "down", "up"

_MEANINGS = {
    b"q": QUIT,
    b"Q": QUIT,
    b"\x03": QUIT,
    b"\x04": QUIT,
    b"j": NEXT,
    b"\t": NEXT,
    b"\x1b[B": NEXT,
    b"\x1b[C": NEXT,
    b"\x1bOB": NEXT,
    b"\x1bOC": NEXT,
    b"k": PREVIOUS,
    b"\x1b[A": PREVIOUS,
    b"\x1b[D": PREVIOUS,
    b"\x1b[Z": PREVIOUS,
    b"\x1bOA": PREVIOUS,
    b"\x1bOD": PREVIOUS,
    b" ": DOWN,
    b"\x1b[6~": DOWN,
    b"b": UP,
    b"\x1b[5~": UP,
}
_WINDOWS = {"H": PREVIOUS, "K": PREVIOUS, "P": NEXT, "M": NEXT, "Q": DOWN, "I": UP}
"""What follows the mark of a special key."""


def meanings(pressed: bytes) -> Iterator[str]:
    """What was pressed, in order; what means nothing here is passed over."""
    while pressed:
        length = 1
        if pressed[:2] in (b"\x1b[", b"\x1bO"):
            # Such a sequence ends with a letter or a tilde.
            length = next(
                (at + 1 for at in range(2, len(pressed)) if pressed[at : at + 1].isalpha() or pressed[at] == 126),
                len(pressed),
            )
        if meaning := _MEANINGS.get(pressed[:length]):
            yield meaning
        pressed = pressed[length:]


if sys.platform == "win32":
    import msvcrt

    class Keys:
        """Keys pressed in this console."""

        def __enter__(self) -> Keys:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait(self, seconds: float) -> list[str]:
            """What is pressed within so many seconds; returns at the first key."""
            end = time.monotonic() + seconds
            while not msvcrt.kbhit():
                if time.monotonic() >= end:
                    return []
                time.sleep(0.03)
            found: list[str] = []
            while msvcrt.kbhit():
                letter = msvcrt.getwch()
                if letter in ("\x00", "\xe0"):
                    found += filter(None, [_WINDOWS.get(msvcrt.getwch())])
                else:
                    found += meanings(letter.encode("utf-8", "ignore"))
            return found

else:
    import select
    import termios
    import tty

    class Keys:
        """Keys pressed on standard input; where that is no terminal there are none."""

        def __init__(self) -> None:
            self._input: int | None = None
            try:
                number = sys.stdin.fileno()
                self._before = termios.tcgetattr(number)
                self._input = number
            except (OSError, ValueError, AttributeError, termios.error):
                return  # standard input is a file, or closed

        def __enter__(self) -> Keys:
            if self._input is not None:
                tty.setcbreak(self._input)
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if self._input is not None:
                try:
                    termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
                except termios.error:
                    pass  # the terminal is gone, and its settings with it

        def wait(self, seconds: float) -> list[str]:
            """What is pressed within so many seconds; returns at the first key."""
            if self._input is None:
                time.sleep(seconds)
                return []
            ready, _, _ = select.select([self._input], [], [], seconds)
            if not ready:
                return []
            pressed = os.read(self._input, 1024)
            return list(meanings(pressed)) if pressed else [QUIT]  # nothing more will come: the terminal is gone

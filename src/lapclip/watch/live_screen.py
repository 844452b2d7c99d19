"""The image on a terminal's other screen, drawn again when there is something new."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from lapclip.watch.keys import DOWN, NEXT, PREVIOUS, QUIT, UP, Keys
from lapclip.watch.screen import Pens, Typed, image
from lapclip.watch.terminal_surface import ending_well
from lapclip.watch.watched_runs import Watching

TICK = 0.25
"""Seconds between two looks at the files."""
SHARE = 0.005
"""Of the machine's time that following may take: a run that is watched must not notice."""
SLOWEST = 10.0
"""Seconds between two images at most, however dear they are."""
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""To the other screen, without a cursor and without wrapping; and back."""


class Live:
    """The image on the terminal's other screen, drawn again when there is something new."""

    def __init__(self, watching: Watching, typed: Typed) -> None:
        self._watching, self._typed = watching, typed
        self._console = Console(highlight=False)
        self._pace = Pace(os.cpu_count() or 1)
        self._shown: list[str] = []
        self._size: tuple[int, int] = (0, 0)
        self._scrolled = 0

    def run(self) -> None:
        """Until someone quits."""
        keys = Keys()
        with ending_well(self._suspend(keys)), self._screen(), keys:
            stale = True
            while True:
                if stale or self._console.size != self._size or (self._pace.due() and self._watching.changed()):
                    with self._pace.counting():
                        self._watching.refresh()
                        self._draw()
                pressed = keys.wait(TICK)
                if QUIT in pressed:
                    return
                stale = bool(pressed)
                for key in pressed:
                    self._act(key)

    def _act(self, key: str) -> None:
        page = max(1, self._size[1] - 3)
        if key in (NEXT, PREVIOUS):
            self._watching.move(1 if key == NEXT else -1)
            self._scrolled = 0
        self._scrolled += {DOWN: page, UP: -page}.get(key, 0)

    def _draw(self) -> None:
        """Write the lines that differ from what is there: little to send over ssh, and nothing flickers."""
        clear = ""
        if (size := self._console.size) != self._size:
            self._size, self._shown, clear = (size.width, size.height), [], "\x1b[1;1H\x1b[J"
        lines = self._lines(*self._size)
        changes = [
            f"\x1b[{at};1H{line}\x1b[K" for at, line in enumerate(lines, 1) if self._shown[at - 1 : at] != [line]
        ]
        rest = (
            f"\x1b[{len(lines) + 1};1H\x1b[J" if len(lines) < self._size[1] and len(lines) != len(self._shown) else ""
        )
        self._shown = lines
        if changes or rest:
            sys.stdout.write(clear + "".join(changes) + rest)
            sys.stdout.flush()

    def _lines(self, width: int, height: int) -> list[str]:
        watching, pens = self._watching, Pens.of(self._console)
        drawn = image(watching.looks, watching.focus, width, tall(height), pens, self._typed)
        body, room = rendered(self._console, drawn, width), max(1, height - 1)
        self._scrolled = max(0, min(self._scrolled, len(body) - room))
        below = len(body) - room - self._scrolled
        words = [
            "q quit",
            "j/k other run" if len(watching.runs) > 1 else "",
            "space/b scroll" if len(body) > room else "",
        ]
        footer = Text("  ".join([*filter(None, words), f"{below} more lines" if below > 0 else ""]), style="dim")
        footer.truncate(width)
        return [*body[self._scrolled : self._scrolled + room], *rendered(self._console, footer, width)]

    @contextmanager
    def _screen(self) -> Iterator[None]:
        sys.stdout.write(ENTER)
        sys.stdout.flush()
        try:
            yield
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.write(LEAVE)
                sys.stdout.flush()

    def _suspend(self, keys: Keys) -> Callable[[int, FrameType | None], None]:
        """What Ctrl-Z does: give the terminal back, stop, and take it again afterwards."""

        def handler(number: int, _: FrameType | None) -> None:
            keys.__exit__(None, None, None)
            sys.stdout.write(LEAVE)
            sys.stdout.flush()
            before = signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            signal.signal(number, before)
            keys.__enter__()
            sys.stdout.write(ENTER)
            self._shown = []
            self._size = (0, 0)

        return handler


class Pace:
    """How often an image may be drawn: so that all of it takes a small share of the machine's time."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = time.process_time()
        yield
        self._next = time.monotonic() + self.rest(time.process_time() - before)

    def rest(self, spent: float) -> float:
        """Seconds to wait after an image that took so many seconds of one core."""
        return min(SLOWEST, max(TICK, spent / (SHARE * self._cores)))


def tall(height: int) -> int:
    """Lines of a large curve in a window of this height."""
    return max(2, min(6, (height - 16) // 4))


def rendered(console: Console, drawn: Any, width: int) -> list[str]:
    """Lines with their colours, each whole in itself."""
    with console.capture() as captured:
        console.print(drawn, width=width, crop=True)
    return captured.get().removesuffix("\n").split("\n")

"""`lapclip watch` in a terminal: a screen that follows the runs, or plain lines where there is no terminal; and which
runs are watched, and which of them is in focus.

Keys are read as they are pressed, without Enter, on POSIX and on Windows. The terminal is given back as it was.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from lapclip.runs.folder import all_runs, find_run
from lapclip.runs.follow import FollowedRun
from lapclip.runs.messages import watch_line
from lapclip.runs.view import RunView
from lapclip.text import one_line, to_json
from lapclip.watch.panels import Canvas
from lapclip.watch.screen import Typed, draw, next_commands

TICK = 0.25
"""Seconds between two readings of the files."""
SHARE = 0.005
"""Of the machine's time that following may take: a run that is watched must not notice."""
SLOWEST = 10.0
"""Seconds between two drawings at most, however dear they are."""
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""To the other screen, without a cursor and without wrapping; and back."""
GONE = (errno.EPIPE, errno.EIO, errno.EINVAL)
"""What writing to a reader or a terminal that went away says; the last on Windows."""


def watch(names: Sequence[str], typed: Typed, once: bool = False, as_json: bool = False) -> int:
    """Show the runs until q or Ctrl-C. Returns the exit status."""
    _print_utf_8()
    if as_json:
        watching = WatchedRuns(names)
        watching.refresh()
        views = [view.to_dict(lambda view: next_commands(view, typed)) for view in watching.views]
        print(to_json({"runs": views}))
        return 0
    live = not once and _can_draw()
    watching = WatchedRuns(names)
    with _quiet_end(interrupted=0 if live else 130) as status:
        if live:
            LiveScreen(watching, typed).run()
        else:
            _snapshot(watching, typed)
            if not once:
                _follow_in_lines(watching, typed)
    return status[0]


def _snapshot(watching: WatchedRuns, typed: Typed) -> None:
    watching.refresh()
    console = Console(highlight=False)
    canvas = Canvas.of(console, console.width)
    for at in range(len(watching.runs)):
        # Each run in full; the table of all stands above the first.
        views = watching.views if at == 0 else watching.views[at : at + 1]
        # Printed by Python itself: rich would end the process, with a fault, where the reader has gone away.
        print("\n".join(rendered(console, draw(views, 0, canvas, typed), console.width)))
    sys.stdout.flush()


def _follow_in_lines(watching: WatchedRuns, typed: Typed) -> None:
    """A line an evaluation, and whatever else happens, until all runs have ended."""
    while any(view.working for view in watching.views):
        time.sleep(1.0)
        for run in watching.runs:
            before = run.view.status
            new = run.refresh() if run.changed() else []
            view, loss = run.view, run.view.small_curve("loss").y
            left = view.time_left.seconds if view.time_left else None
            for event in new:
                if line := watch_line(event, view.name, loss[-1] if loss else None, left):
                    print(line)
            if view.status not in (before, "running"):
                commands = f"  Next: {next_commands(view, typed)[0]}" if not view.working else ""
                print(f"{one_line(view.name)}: {view.status}{commands}")
        watching.refresh()
        sys.stdout.flush()


class LiveScreen:
    """The terminal's other screen, drawn again when there is something new."""

    def __init__(self, watching: WatchedRuns, typed: Typed) -> None:
        self._watching, self._typed = watching, typed
        self._console = Console(highlight=False)
        self._pace = Pace(os.cpu_count() or 1)
        self._shown: list[str] = []
        self._size: tuple[int, int] = (0, 0)
        self._scrolled = 0

    def run(self) -> None:
        """Until someone quits."""
        keys = Keys()
        with _ending_well(self._suspend(keys)), self._screen(), keys:
            stale = True
            while True:
                if (
                    stale
                    or self._console.size != self._size
                    or (self._pace.due() and self._watching.changed())
                ):
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
            # Erased before it is written: behind a full line the cursor still stands on its last character.
            f"\x1b[{at};1H\x1b[K{line}"
            for at, line in enumerate(lines, 1)
            if self._shown[at - 1 : at] != [line]
        ]
        rest = (
            f"\x1b[{len(lines) + 1};1H\x1b[J"
            if len(lines) < self._size[1] and len(lines) != len(self._shown)
            else ""
        )
        self._shown = lines
        if changes or rest:
            sys.stdout.write(clear + "".join(changes) + rest)
            sys.stdout.flush()

    def _lines(self, width: int, height: int) -> list[str]:
        watching = self._watching
        drawn = draw(
            watching.views,
            watching.focus,
            Canvas.of(self._console, width, curve_height(height)),
            self._typed,
        )
        body, room = rendered(self._console, drawn, width), max(1, height - 1)
        self._scrolled = max(0, min(self._scrolled, len(body) - room))
        below = len(body) - room - self._scrolled
        keys = [
            "q quit",
            "j/k other run" if len(watching.runs) > 1 else "",
            "space/b scroll" if len(body) > room else "",
        ]
        footer = Text(
            "  ".join([*filter(None, keys), f"{below} more lines" if below > 0 else ""]),
            style="dim",
        )
        footer.truncate(width)
        return [
            *body[self._scrolled : self._scrolled + room],
            *rendered(self._console, footer, width),
        ]

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
    """How often the screen may be drawn: so that all of it takes a small share of the machine's time."""

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
        """Seconds to wait after a drawing that took so many seconds of one core."""
        return min(SLOWEST, max(TICK, spent / (SHARE * self._cores)))


def curve_height(height: int) -> int:
    """Lines of a large curve in a window of this height."""
    return max(2, min(6, (height - 16) // 4))


def rendered(console: Console, drawn: Any, width: int) -> list[str]:
    """Lines with their colours, each whole in itself."""
    with console.capture() as captured:
        console.print(drawn, width=width, crop=True)
    return captured.get().removesuffix("\n").split("\n")


def _can_draw() -> bool:
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
    return bool(
        kernel.GetConsoleMode(handle, ctypes.byref(mode))
        and kernel.SetConsoleMode(handle, mode.value | 4)
    )


def _print_utf_8() -> None:
    """Print curves and bars as UTF-8, also into files on Windows."""
    with suppress(AttributeError, ValueError, OSError):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _ending_well(suspend: Callable[[int, FrameType | None], None]) -> Iterator[None]:
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
def _quiet_end(interrupted: int) -> Iterator[list[int]]:
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


class WatchedRuns:
    """Several runs, one of them in focus. Without names: those that are running, or else the newest."""

    def __init__(self, names: Sequence[str]) -> None:
        if names:
            runs = [find_run(name) for name in dict.fromkeys(names)]
        else:
            runs = [run for run in all_runs() if run.running] or [find_run(None)]
        self.runs = [FollowedRun(run) for run in runs]
        self.focus = 0 if names else len(runs) - 1

    @property
    def views(self) -> list[RunView]:
        return [run.view for run in self.runs]

    def move(self, by: int) -> None:
        """Put another run in focus, round and round."""
        self.focus = (self.focus + by) % len(self.runs)

    def changed(self) -> bool:
        return any(run.changed() for run in self.runs)

    def refresh(self) -> None:
        """Bring everything up to date."""
        for run in self.runs:
            if run.changed():
                run.refresh()


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


def meanings(pressed: bytes) -> Iterator[str]:
    """What was pressed, in order; what means nothing here is passed over."""
    while pressed:
        length = 1
        if pressed[:2] in (b"\x1b[", b"\x1bO"):
            # Such a sequence ends with a letter or a tilde.
            length = next(
                (
                    at + 1
                    for at in range(2, len(pressed))
                    if pressed[at : at + 1].isalpha() or pressed[at] == 126
                ),
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
                    msvcrt.getwch()  # the second half of an arrow or function key looks like a letter
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
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
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
            return (
                list(meanings(pressed)) if pressed else [QUIT]
            )  # nothing more will come: the terminal is gone

"""A run as it goes, on the terminal: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status

from lapclip.progress import work_on_data
from lapclip.runs import events
from lapclip.runs.events import Event
from lapclip.runs.messages import LineWriter, log_line
from lapclip.text import duration

EVERY = 10.0
"""Seconds between two lines about what is being done, where there is no terminal."""


class ClosableTerminal:
    """Standard error, where a terminal that was just closed must not end the run: SIGHUP follows, and saves it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str, /) -> int:
        with _closed_terminal_ignored():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _closed_terminal_ignored():
            self._stream.flush()


@contextmanager
def _closed_terminal_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class Display:
    """Follows a run through its events, in a terminal."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._console = console or Console(
            file=cast("IO[str]", ClosableTerminal(sys.stderr)), highlight=False
        )
        self._lines = (
            None
            if self._console.is_terminal
            else LineWriter(sys.stderr, every=5.0, clock=time.monotonic)
        )
        self._bar: tuple[Progress, TaskID] | None = None
        self._batch_size = 0
        self._total_steps = 0
        self._rate_start = (0, 0.0)  # step and time from which the rate is measured
        self._doing = ("", 0)
        self._status: Status | None = None
        self._printed = -EVERY

    def data_progress(self, done: int, total: int, what: str = "drawing", /) -> None:
        """Called while images are made; `what` is being done to them, or to captions, if it says so."""
        of = work_on_data(what)
        if self._lines:
            if (what, total) != self._doing:
                print(f"{of}: {total:,}", file=sys.stderr, flush=True)
            self._doing = (what, total)
            return
        if self._doing != (what, total):
            self.close()
        self._doing = (what, total)
        self._count(of, done, total)

    def counting(self, what: str) -> Callable[[int, int], None]:
        """A callback for how much is done and how much there is, while images are embedded or examined."""

        def update(done: int, total: int) -> None:
            if self._lines:
                self._print_now_and_then(f"{what}: {done:,} of {total:,}")
                return
            self._count(what, done, total)

        return update

    def doing(self, what: str) -> None:
        """Called with each thing that takes a moment, before it is begun."""
        if self._lines:
            print(what, file=sys.stderr, flush=True)
            return
        self._show_status(what)

    def waiting(self, what: str) -> None:
        """Called again and again while something goes on whose end is not known."""
        if self._lines:
            self._print_now_and_then(what)
            return
        self._show_status(what)

    def tuning_progress(self, what: str) -> None:
        """Called while settings are tried; what is being timed comes and goes on one line."""
        self.waiting(f"measuring this machine: {what}")

    def __call__(self, event: Event) -> None:
        """Show an event of the run."""
        self._end_status()
        if self._lines:
            if not isinstance(event, events.Finished):  # its scores follow as a table
                self._lines(event)
            return
        match event:
            case events.Started():
                self._batch_size = event.config["train"]["batch_size"]
                self._say(event)
                self._start("training", event.steps)
                self._restart_rate(0, event.steps)
            case events.Resumed():
                self._batch_size = event.batch_size
                self._say(event)
                self._start("training", event.steps, event.step)
                self._restart_rate(event.step, event.steps)
            case events.Step():
                accuracy = (event.t2i_accuracy + event.i2t_accuracy) / 2
                self._update(
                    event.step,
                    f"loss {event.loss:.3f}  accuracy {accuracy:.0%}{self._rate(event.step)}",
                )
            case events.FellBack():
                self._restart_rate(
                    event.step, self._total_steps
                )  # the settings and so the rate have changed
                self._say(event)
                self._update(event.step, "")
            case events.Evaluation() | events.Paused() | events.WentOn():
                self._say(event)
            case events.Finished():
                self._fill()
                self.close()
            case events.Failed() | events.Stopped():
                self.close()

    def close(self) -> None:
        """Leave the terminal tidy."""
        self._end_status()
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _print_now_and_then(self, text: str) -> None:
        """A line now and then, where there is no terminal."""
        if time.monotonic() - self._printed > EVERY:
            print(text, file=sys.stderr, flush=True)
            self._printed = time.monotonic()

    def _show_status(self, text: str) -> None:
        if self._status is None:
            self._status = self._console.status("", spinner="line")
            self._status.start()
        self._status.update(text)

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say(self, event: Event) -> None:
        self._console.print(log_line(event), style="dim", markup=False, soft_wrap=True)

    def _restart_rate(self, step: int, total_steps: int) -> None:
        self._total_steps = total_steps
        self._rate_start = step, self._clock()

    def _rate(self, step: int) -> str:
        """Return pairs per second and the time left, measured since training began or went on."""
        first_step, began = self._rate_start
        steps, seconds = step - first_step, self._clock() - began
        if steps < 1 or seconds <= 0:
            return ""
        left = (self._total_steps - step) * seconds / steps
        return f"  {steps * self._batch_size / seconds:,.0f} pairs/s  {duration(left)} left"

    def _count(self, what: str, done: int, total: int) -> None:
        self._end_status()
        if self._bar is None:
            self._start(what, total)
        self._update(done, "")
        if done == total:
            self.close()
            self._show_status(
                f"{what}: all {total:,} done; computing"
            )  # what follows may take long, and say nothing

    def _start(self, what: str, total: int, completed: int = 0) -> None:
        columns = (
            TextColumn(what),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TextColumn("{task.fields[metrics]}"),
        )
        if what != "training":  # its rate and time left are in the metrics
            columns = (*columns, TimeRemainingColumn(compact=True), TextColumn("left"))
        # Images are drawn before training begins; their bar goes away when they are done.
        bar = Progress(*columns, console=self._console, transient=what != "training", expand=True)
        self._bar = (bar, bar.add_task(what, total=total, completed=completed, metrics=""))
        bar.start()

    def _fill(self) -> None:
        """Show a run that ended early as complete."""
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, total=bar.tasks[0].completed)

    def _update(self, completed: int, metrics: str) -> None:
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=completed, metrics=metrics)


@contextmanager
def loading() -> Iterator[None]:
    """Say on a terminal that torch is being loaded: that takes seconds, and shows nothing by itself."""
    console = Console(stderr=True, highlight=False)
    if "torch" in sys.modules or not console.is_terminal:
        yield
        return
    with console.status("loading torch", spinner="line"):
        yield


@contextmanager
def display() -> Iterator[Display]:
    """A display that is closed whatever happens."""
    shown = Display()
    try:
        yield shown
    finally:
        shown.close()

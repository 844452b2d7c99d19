"""What commands share: --json and --debug, printing, and progress while a run works."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lapclip.records import events
from lapclip.records.events import Event
from lapclip.records.lines import LineWriter, line


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object to stdout; everything for people goes to stderr."""
    debug: Annotated[bool, Parameter(negative="")] = False
    """Show the traceback of an error."""


def emit(result: dict[str, Any], summary: list[str], common: Common | None) -> None:
    """Print the result: as JSON for scripts, or as a few lines for people."""
    if common and common.json:
        print(json.dumps(result))
        return
    console = Console(highlight=False)
    for text in summary:
        console.print(text, soft_wrap=True)


def console() -> Console:
    """Where progress goes."""
    return Console(stderr=True, highlight=False)


class Display:
    """Follows a run: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = console()
        self._live = self._console.is_terminal
        self._lines = LineWriter(sys.stderr, every=5.0, clock=time.monotonic)
        self._bar: Progress | None = None
        self._task: Any = None
        self._batch_size = 0
        self._first: tuple[int, float] | None = None
        self._announced = False

    def data_progress(self, done: int, total: int) -> None:
        """Called while pictures are made."""
        if not self._live:
            if not self._announced:
                print(f"drawing {total:,} pictures, once", file=sys.stderr, flush=True)
            self._announced = True
            return
        if self._bar is None:
            self._start(total, "drawing pictures", TextColumn("{task.fields[figures]}"))
        assert self._bar is not None
        self._bar.update(self._task, completed=done)
        if done == total:
            self.close()

    def __call__(self, event: Event) -> None:
        """Called with each event of the run."""
        if not self._live:
            self._lines(event)
            return
        match event:
            case events.Started():
                self._batch_size = event.config["train"]["batch_size"]
                self._console.print(f"[dim]{line(event)}[/dim]")
                self._start(event.steps, "training", TextColumn("{task.fields[figures]}"))
            case events.Resumed():
                self._console.print(f"[dim]{line(event)}[/dim]")
                self._start(event.steps, "training", TextColumn("{task.fields[figures]}"), event.step)
            case events.Step():
                self._step(event)
            case events.Finished() | events.Failed() | events.Stopped():
                self.close()
            case events.Evaluation() if self._bar:
                self._bar.console.print(f"[dim]{line(event)}[/dim]", soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _step(self, event: events.Step) -> None:
        if self._bar is None:
            return
        now = time.monotonic()
        self._first = self._first or (event.step, now)
        steps, seconds = event.step - self._first[0], now - self._first[1]
        rate = f"  {steps * self._batch_size / seconds:.0f} pairs/s" if steps and self._batch_size else ""
        accuracy = (event.t2i_accuracy + event.i2t_accuracy) / 2
        self._bar.update(
            self._task, completed=event.step, figures=f"loss {event.loss:.3f}  accuracy {accuracy:.0%}{rate}"
        )

    def _start(self, total: int, what: str, figures: TextColumn, completed: int = 0) -> None:
        columns = (
            TextColumn(what),
            BarColumn(20),
            MofNCompleteColumn(),
            figures,
            TimeElapsedColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=what != "training")
        self._bar.start()
        self._task = self._bar.add_task(what, total=total, completed=completed, figures="")


@contextmanager
def display():
    """A display that is closed whatever happens."""
    shown = Display()
    try:
        yield shown
    finally:
        shown.close()

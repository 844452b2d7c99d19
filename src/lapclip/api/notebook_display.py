"""A run as it goes, below a notebook's cell: a bar with the last numbers, and a line for each evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lapclip.progress import work_on_data
from lapclip.progress_bar import LiveHtml, bar_html
from lapclip.runs import events
from lapclip.runs.events import Event
from lapclip.runs.messages import log_line

LINES = 6
"""Lines of the run that are shown, the newest last."""


class NotebookDisplay:
    """Follows a run through its events: a `lapclip.cli.display.RunDisplay`."""

    def __init__(self) -> None:
        self._html = LiveHtml()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._steps = 0

    def data_progress(self, done: int, total: int, what: str = "drawing", /) -> None:
        self._bar(work_on_data(what), done, total)

    def counting(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self._bar(what, done, total)

    def doing(self, what: str) -> None:
        self._bar(what, 0, 0)

    def waiting(self, what: str) -> None:
        self._bar(what, 0, 0)

    def tuning_progress(self, what: str) -> None:
        self._bar(f"measuring this machine: {what}", 0, 0)

    def __call__(self, event: Event) -> None:
        match event:
            case events.Started() | events.Resumed():
                self._steps = event.steps
                self._say(event)
            case events.Step():
                accuracy = (event.t2i_accuracy + event.i2t_accuracy) / 2
                self._bar(
                    "training",
                    event.step,
                    self._steps,
                    f"loss {event.loss:.3f}  accuracy {accuracy:.0%}",
                )
            case (
                events.Checkpoint()
                | events.Memory()
                | events.Sensors()
                | events.Probed()
                | events.Ranks()
            ):
                pass
            case _:
                self._say(event)

    def close(self) -> None:
        """Leave the last lines there; a bar of something that is over goes away."""
        if self._lines:
            self._html.show(bar_html("", 0, 0, lines=[*self._lines]), now=True)
        else:
            self._html.clear()

    def _say(self, event: Event) -> None:
        self._lines += log_line(event).splitlines()
        self._bar("", 0, 0)

    def _bar(self, what: str, done: int, total: int, text: str = "") -> None:
        self._html.show(
            bar_html(what, done, total, text, [*self._lines]), now=bool(total) and done >= total
        )

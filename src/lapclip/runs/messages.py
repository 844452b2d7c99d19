"""An event as a line for people: for log.txt, and for the terminal where a progress bar would not work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from lapclip.runs import events
from lapclip.runs.events import Event


def line(event: Event) -> str | None:
    """What a person wants to know of an event, if anything."""
    match event:
        case events.Started():
            places = " and ".join(f"{tower} tower on {place}" for tower, place in event.devices.items())
            size = f"{event.parameters:,} parameters, {event.pairs['train']:,} images, {event.steps:,} steps"
            notes = "".join(f"\n{note}" for note in event.notes)
            return f"{size}; {places} ({event.reasons['train.device']}){notes}"
        case events.Resumed():
            damaged = "".join(f"; skipped a damaged checkpoint, {reason}" for reason in event.skipped)
            notes = "".join(f"\n{note}" for note in event.notes)
            return f"going on after step {event.step:,} of {event.steps:,}{damaged}{notes}"
        case events.Step():
            accuracy = (event.t2i_accuracy + event.i2t_accuracy) / 2
            return f"step {event.step}  epoch {event.epoch}  loss {event.loss:.3f}  accuracy {accuracy:.1%}"
        case events.Evaluation():
            best = "  best" if event.best else ""
            return f"step {event.step}  epoch {event.epoch}  {recall_line(event.evaluation)}{best}"
        case events.FellBack():
            return event.text
        case events.Paused():
            return f"paused after step {event.step}: {event.reason}"
        case events.WentOn():
            return f"going on after {event.seconds:,.0f} s"
        case events.Stopped():
            return f"stopped after step {event.step}: {event.reason}"
        case events.Failed():
            return f"failed after step {event.step}: {event.error}"
        case events.Finished():
            early = f" at step {event.step:,}, {event.early}" if event.early else ""
            start = f"; at the start {recall_line(event.start_evaluation)}" if event.start_evaluation else ""
            return f"finished{early}: {recall_line(event.evaluation)}{start}"
    return None


def recall_line(evaluation: dict) -> str:
    """Recall both ways, in one line."""
    both = ((way, [evaluation[f"{way}_r{rank}"] for rank in (1, 5, 10)]) for way in ("t2i", "i2t"))
    return "  ".join(f"{way} R@1/5/10 {' / '.join(f'{value:.1%}' for value in values)}" for way, values in both)


class LineWriter:
    """Writes events as lines to a stream; of the steps only the first, and then at most one in `every` seconds."""

    def __init__(self, stream: TextIO, every: float, clock: Callable[[], float]) -> None:
        self._stream, self._every, self._clock = stream, every, clock
        self._next_step_line = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.Step):
            if self._clock() < self._next_step_line:
                return
            self._next_step_line = self._clock() + self._every
        if text := line(event):
            with suppress(OSError):  # a closed terminal or a full disk must not end a run for the sake of a log line
                print(text, file=self._stream, flush=True)

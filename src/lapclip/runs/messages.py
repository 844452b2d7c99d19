"""An event as a sentence: in log.txt, beside a progress bar, in `lapclip watch` and in reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from lapclip.runs import events
from lapclip.runs.events import Event, mapping
from lapclip.runs.summary import Summary, batch_accuracy
from lapclip.runs.trend import deciding_score, is_worse, score_name
from lapclip.text import count, duration, number, one_line, percent, printable_lines, significant

NO_REASON = "no reason was given"
MAX_NOTES = 5  # lines of a start below its first one
STOPPED_BY = {
    "SIGINT": "Ctrl-C",
    "SIGTERM": "another program (SIGTERM)",
    "SIGHUP": "closing the terminal (SIGHUP)",
    "lapclip stop": "lapclip stop",
}
"""Who ended a run, by the reason that its `stopped` event gives."""


@dataclass(frozen=True)
class Notice:
    """Something that happened in a run besides learning."""

    type: str
    time: float
    step: int | None
    text: str

    @property
    def bad(self) -> bool:
        return self.type in ("fell_back", "failed", "paused")


def message(event: dict[str, Any], *, with_step: bool = False) -> str:
    """What happened besides learning: a resume, a fallback, a pause, an end; nothing for other events.

    `with_step` names the step, where it does not stand beside the sentence already. What an event says may be foreign
    text, such as a file's name in an error, so nothing in it steers a terminal.
    """
    return "; ".join(messages(event, with_step=with_step))


def messages(event: dict[str, Any], *, with_step: bool = False) -> list[str]:
    """The same as one text for each thing that happened: a start has as many as it has notes."""
    if event["type"] == "started":
        notes = event.get("notes")
        return [printable_lines(str(note)) for note in notes] if isinstance(notes, list) else []
    text = printable_lines(_message(event, with_step))
    return [text] if text else []


def _message(event: dict[str, Any], with_step: bool) -> str:
    step = number(event.get("step"))
    after = f" after step {step:,.0f}" if with_step and step is not None else ""
    match event["type"]:
        case "resumed":
            skipped = event.get("skipped")
            named = "; ".join(map(str, skipped)) if isinstance(skipped, list) else ""
            damaged = f"; skipped a damaged checkpoint: {named}" if named else ""
            steps = number(event.get("steps")) if after else None
            return f"resumed{after}{f' of {steps:,.0f}' if steps else ''}{damaged}"
        case "fell_back":
            return str(
                event.get("text") or f"fell back{after}: {event.get('cause') or 'unknown cause'}"
            )
        case "paused":
            return f"paused{after}: {event.get('reason') or NO_REASON}"
        case "went_on":
            seconds = number(event.get("seconds"))
            return "went on" if seconds is None else f"went on after {duration(seconds)}"
        case "stopped":
            return f"stopped{after}{stopped_by(event)}"
        case "failed":
            return f"failed{after}: {event.get('error') or NO_REASON}"
    return ""


def stopped_by(event: dict[str, Any]) -> str:
    """What follows the word "stopped": by whom, or the reason that is given."""
    reason = str(event.get("reason") or NO_REASON)
    return f" by {STOPPED_BY[reason]}" if reason in STOPPED_BY else f": {reason}"


def notices(summary: Summary) -> list[Notice]:
    """What happened besides learning, in the order of its time."""
    found = []
    for event in summary.incidents:
        step = number(event.get("step"))
        time = number(event.get("time")) or 0.0
        for text in messages(event):
            found.append(
                Notice(event["type"], time, None if step is None else int(step), one_line(text))
            )
    known = {notice.time for notice in found if notice.type == "went_on"}
    for begin, end in summary.pauses:
        if end not in known:
            found.append(
                Notice("slept", end, None, f"the machine slept for {duration(end - begin)}")
            )
    return sorted(found, key=lambda notice: notice.time)


def recall_text(evaluation: dict[str, Any], split: object = "") -> str:
    """Recall both ways, in one line, behind the split that it was measured on: as given, or as the metrics say."""
    on = split or evaluation.get("split")
    images, captions = (
        " / ".join(percent(evaluation.get(f"{way}_r{rank}")) for rank in (1, 5, 10))
        for way in ("t2i", "i2t")
    )
    recalls = f"text to image R@1/5/10 {images}, image to text {captions}"
    return f"{one_line(on)} {recalls}" if on else recalls


def best_text(event: dict[str, Any]) -> str:
    """Return the score that decides which model is kept, if this evaluation has the best so far."""
    evaluation = mapping(event.get("evaluation"))
    score = deciding_score(evaluation)
    if not event.get("best") or score is None:
        return ""
    return f"best so far ({score_name(evaluation)} {percent(score)})"


def log_line(event: Event | dict[str, Any]) -> str:
    """An event as a line of log.txt, and of a terminal where a progress bar would not work; empty for most kinds."""
    return printable_lines(_log_line(event.to_dict(0.0) if isinstance(event, Event) else event))


def _log_line(values: dict[str, Any]) -> str:
    at = f"step {values.get('step')}  epoch {values.get('epoch')}"
    evaluation = mapping(values.get("evaluation"))
    match values["type"]:
        case "started":
            return "\n".join([_about_run(values), *_few_notes(values)])
        case "resumed":
            return "\n".join([message(values, with_step=True), *_few_notes(values)])
        case "step":
            return f"{at}  loss {values['loss']:.3f}  accuracy {percent(batch_accuracy(values))}"
        case "evaluation":
            parts = [at, recall_text(evaluation, values.get("split")), best_text(values)]
            return "  ".join(filter(None, parts))
        case "finished":
            early = (
                f" at step {count(values.get('step'))}, {values['early']}"
                if values.get("early")
                else ""
            )
            start = mapping(values.get("start_evaluation"))
            began = f"; at the start {recall_text(start)}" if start else ""
            if is_worse(evaluation, start):
                began += "; the start is the better model"
            kept = ""
            if values.get("best_step"):
                kept = f"; the model of step {count(values['best_step'])} is kept"
            return f"finished{early}: {recall_text(evaluation)}{kept}{began}"
    return message(values, with_step=True)


def _about_run(values: dict[str, Any]) -> str:
    pairs = values["pairs"]
    held_out = sum(images for split, images in pairs.items() if split != "train")
    devices = " and ".join(dict.fromkeys(values["devices"].values()))
    return (
        f"training: {pairs['train']:,} images, {held_out:,} held out; {values['steps']:,} steps "
        f"on {devices}; {values['parameters']:,} parameters"
    )


def _few_notes(values: dict[str, Any]) -> list[str]:
    """Return the notes of a start, the first of them if there are many. All are in run.toml."""
    notes = [str(note) for note in values.get("notes") or []]
    if len(notes) <= MAX_NOTES:
        return notes
    more = len(notes) - MAX_NOTES + 1
    return [*notes[: MAX_NOTES - 1], f"{more} more notes in run.toml"]


def watch_line(
    event: dict[str, Any], name: str, loss: float | None = None, seconds_left: float | None = None
) -> str:
    """An event of the run `name` as one line, for a watch in a pipe; empty for steps, which come by the thousand."""
    step, evaluation = number(event.get("step")), event.get("evaluation")
    head = f"{one_line(name)}: step {step:,.0f}" if step is not None else f"{one_line(name)}:"
    if event["type"] == "evaluation" and isinstance(evaluation, dict):
        parts = [
            head,
            f"epoch {count(event.get('epoch'))}",
            f"loss {significant(loss)}" if loss is not None else "",
            recall_text(evaluation, event.get("split")),
            best_text(event),
            f"{duration(seconds_left)} left" if seconds_left is not None else "",
        ]
        return "  ".join(filter(None, parts))
    if event["type"] == "finished" and isinstance(evaluation, dict):
        return f"{head}  finished  {recall_text(evaluation)}"
    text = message(event) if event["type"] != "started" else "started"
    return f"{head}  {one_line(text)}" if text else ""


class LineWriter:
    """Writes events as lines to a stream; of the steps only the first, and then at most one in `every` seconds."""

    def __init__(self, stream: IO[str], every: float, clock: Callable[[], float]) -> None:
        self._stream, self._every, self._clock = stream, every, clock
        self._next_step_line = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.Step):
            if self._clock() < self._next_step_line:
                return
            self._next_step_line = self._clock() + self._every
        if text := log_line(event):
            with suppress(
                OSError
            ):  # a closed terminal or a full disk must not end a run for the sake of a log line
                print(text, file=self._stream, flush=True)

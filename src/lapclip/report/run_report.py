"""A run as a report."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from lapclip.report.document import Block, Headline, Report, Section, Sentences, Table
from lapclip.report.learning_plots import learning
from lapclip.report.machine_plots import working
from lapclip.runs.summary import Summary
from lapclip.text import UNKNOWN, count, duration, interval, number, parameters, percent, size


def run_report(name: str, state: str, summary: Summary, more: list[Section]) -> Report:
    """Everything a run's events tell, and `more` at the end."""
    began = number(summary.started.get("time"))
    when = f", started {datetime.fromtimestamp(began):%Y-%m-%d %H:%M}" if began else ""
    progress = f"step {summary.step:,} of {summary.total_steps:,}" if summary.total_steps else "no step yet"
    sections = [
        *_events(summary, state, name),
        *_scores(summary),
        *learning(summary),
        *working(summary),
        *_choices(summary),
        *_machine(summary),
        *more,
    ]
    return Report(f"Run {name}", f"{state}, {progress}{when}", _headlines(summary, state), sections)


def _headlines(summary: Summary, state: str) -> list[Headline]:
    lines: list[Headline] = []
    scores = summary.scores
    if number(scores.get("t2i_r1")) is not None:
        intervals = scores.get("intervals")
        sure = interval(intervals.get("t2i_r1")) if isinstance(intervals, dict) else ""
        chance = f"chance {percent(scores.get('chance'))}"
        lines.append(Headline("held-out text-to-image R@1", percent(scores["t2i_r1"]), _join(sure, chance)))
    if summary.steps:
        left = summary.remaining_seconds if state == "running" else None
        lines.append(Headline("training time", duration(summary.training_seconds), _left(left)))
    if summary.pairs_per_second is not None:
        batch = f"batches of {count(summary.batch_size)}" if summary.batch_size else ""
        lines.append(Headline("speed", f"{count(summary.pairs_per_second)} pairs/s", batch))
    if (peak := summary.peak_memory_bytes) is not None:
        whole = _about(summary, "machine").get("memory_bytes")
        lines.append(Headline("peak memory", size(peak), f"of {size(whole)}" if number(whole) else ""))
    if summary.places:
        first, *moved = summary.places
        moves = [f"then {_place(place)}, from step {place['step']:,} on" for place in moved]
        towers = " and ".join(_towers(first)) + " tower"
        lines.append(Headline("where it ran", _place(first), "; ".join(moves) or towers))
    if (total := number(summary.started.get("parameters"))) is not None:
        lines.append(Headline("model", parameters(total), f"parameters, {summary.setting('model', 'name')}"))
    return lines


def _events(summary: Summary, state: str, name: str) -> list[Section]:
    """What a person should know first: what went wrong, what was changed, what could not be had."""
    notes = summary.started.get("notes")
    said = [str(note) for note in notes] if isinstance(notes, list) else []
    for event in summary.resumes:
        skipped = event.get("skipped") or []
        damaged = f"; skipped a damaged checkpoint: {'; '.join(map(str, skipped))}" if skipped else ""
        said.append(f"Resumed after step {count(event.get('step'))}{damaged}.")
    for at, event in enumerate(summary.fallbacks, 1):
        text = event.get("text") or f"{event.get('cause', 'unknown cause')}: {event.get('change', 'unknown change')}"
        said.append(f"Change {at}, after step {count(event.get('step'))}: {text}")
    if summary.ending.get("type") == "failed":
        said.append(f"Failed after step {count(summary.ending.get('step'))}: {summary.ending.get('error')}")
    if summary.ending.get("type") == "stopped":
        said.append(f"Stopped after step {count(summary.ending.get('step'))}: {summary.ending.get('reason')}")
    if state == "died":
        said.append(f"It ended without a word after step {count(summary.step)}. Go on: lapclip resume {name}")
    if not summary.steps:
        said.append("No step has been recorded yet. Make the report again later.")
    return [Section("What happened", [Sentences(said)])] if said else []


def _scores(summary: Summary) -> list[Section]:
    """Recall both ways beside chance."""
    scores = summary.scores
    if number(scores.get("t2i_r1")) is None:
        return []
    intervals = scores.get("intervals")
    intervals = intervals if isinstance(intervals, dict) else {}
    rows: list[list[Any]] = []
    for way, name in (("t2i", "text to image"), ("i2t", "image to text")):
        recalls = [percent(scores.get(f"{way}_r{rank}")) for rank in (1, 5, 10)]
        rows.append([name, *recalls, interval(intervals.get(f"{way}_r1")) or "-"])
    chance = number(scores.get("chance"))
    if chance is not None:
        rows.append(["chance", *(percent(min(1, rank * chance)) for rank in (1, 5, 10)), ""])
    batch = scores.get("in_batch")
    if isinstance(batch, dict):
        sure = _join(interval(batch.get("interval")), f"chance {percent(batch.get('chance'))}")
        rows.append([f"in batches of {batch.get('size')}", percent(batch.get("accuracy")), "", "", sure])
    finished = summary.ending.get("type") == "finished"
    whose = (
        "The best model, on pairs that did not choose it"
        if finished
        else "The best model so far, on the validation pairs"
    )
    said = f"{whose}: {count(scores.get('candidates'))} candidates, split {scores.get('split') or 'unknown'}."
    return [
        Section("Held-out scores", [Sentences([said]), Table(["", "R@1", "R@5", "R@10", "R@1 95 % interval"], rows)])
    ]


def _choices(summary: Summary) -> list[Section]:
    """Each automatic choice with its reason, and every setting."""
    blocks: list[Block] = []
    reasons = _about(summary, "reasons")
    if reasons:
        rows = [[name, _value(summary, name), str(reason)] for name, reason in reasons.items()]
        blocks.append(Table(["setting", "choice", "reason"], [[*row] for row in rows]))
        blocks.append(Sentences(["Any of them can be set by hand: lapclip train --set SETTING=VALUE."]))
    config = _about(summary, "config")
    settings = [
        [f"{section}.{name}", str(value)]
        for section, values in config.items()
        if isinstance(values, dict)
        for name, value in values.items()
    ]
    if settings:
        blocks.append(Table(["setting", "value"], [[*row] for row in settings], folded="All settings"))
    return [Section("Choices and their reasons", blocks)] if blocks else []


def _machine(summary: Summary) -> list[Section]:
    """The computer, the versions, the commit."""
    rows = machine_rows(_about(summary, "machine"))
    rows += [[f"{name} version", str(version)] for name, version in _about(summary, "versions").items()]
    if summary.started.get("commit"):
        rows.append(["commit", str(summary.started["commit"])])
    for place in summary.places:
        since = f" from step {place['step']:,} on" if len(summary.places) > 1 else ""
        rows += [[f"{tower} tower", f"ran on {kind}{since}"] for tower, kind in _towers(place).items()]
    rows += [[f"pairs to {use}", count(pairs)] for split, pairs in _about(summary, "pairs").items()
             for use in [{"train": "train on"}.get(split, f"score on, {split}")]]  # fmt: skip
    return [Section("Machine and versions", [Table(["", ""], [[*row] for row in rows])])] if rows else []


def machine_rows(machine: dict[str, Any]) -> list[list[str]]:
    """Facts of a machine, as rows."""
    shown = {"memory_bytes": ("memory", size), "cores": ("cores", count)}
    rows = []
    for name, value in machine.items():
        title, words = shown.get(name, (name, str))
        if isinstance(value, str | int | float):
            rows.append([title, words(value)])
    return rows


def _about(summary: Summary, name: str) -> dict[str, Any]:
    """A part of the started event that should be a dictionary."""
    found = summary.started.get(name)
    return found if isinstance(found, dict) else {}


def _value(summary: Summary, name: str) -> str:
    """A setting by its whole name."""
    section, _, setting = name.partition(".")
    value = summary.setting(section, setting)
    return UNKNOWN if value is None else str(value)


def _towers(place: dict[str, Any]) -> dict[str, str]:
    return {tower: str(kind) for tower, kind in place.items() if tower != "step"}


def _place(place: dict[str, Any]) -> str:
    """Where the towers are, in a word if it is one place."""
    towers = _towers(place)
    kinds = set(towers.values())
    return kinds.pop() if len(kinds) == 1 else ", ".join(f"{tower} {kind}" for tower, kind in towers.items())


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _left(seconds: float | None) -> str:
    return f"about {duration(seconds)} left" if seconds is not None else ""

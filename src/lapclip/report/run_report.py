"""A run as a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lapclip.report.document import (
    Block,
    Gallery,
    Headline,
    Report,
    ReportImage,
    Section,
    Sentences,
    Table,
)
from lapclip.report.evaluation_report import (
    among_1000_headline,
    recall_table,
    short_question_blocks,
)
from lapclip.report.run_plots import learning_sections, machine_sections
from lapclip.runs.events import mapping, mappings
from lapclip.runs.messages import message, messages
from lapclip.runs.summary import Summary
from lapclip.runs.view import RunView
from lapclip.suggest import command
from lapclip.text import (
    UNKNOWN,
    count,
    duration,
    interval,
    moment,
    number,
    parameters,
    percent,
    significant,
    size,
)

MAX_CAPTIONS, MAX_MATCHES = 4, 4


def run_report(view: RunView, more: list[Section], folder: Path) -> Report:
    """Everything a run's events tell, and `more` at the end. Its small images are in `folder`."""
    summary = view.summary
    when = f", started {moment(view.started)}" if view.started else ""
    progress = (
        f"step {summary.step:,} of {summary.total_steps:,}"
        if summary.total_steps
        else "no step yet"
    )
    sections = [
        *_happened(view),
        *_metrics(summary),
        *learning_sections(view),
        *_pictures(summary, folder),
        *machine_sections(view),
        *_choices(summary),
        *_machine(summary),
        *more,
    ]
    return Report(f"Run {view.name}", f"{view.state}, {progress}{when}", _headlines(view), sections)


def _headlines(view: RunView) -> list[Headline]:
    lines: list[Headline] = []
    summary, scores = view.summary, view.summary.scores
    if number(scores.get("t2i_r1")) is not None:
        sure = interval(mapping(scores.get("intervals")).get("t2i_r1"))
        chance = f"chance {percent(scores.get('chance'))}"
        kept = f"model of step {summary.progress.best_step:,}" if summary.progress.best_step else ""
        lines.append(
            Headline(
                f"held-out text-to-image R@1, {scores.get('split') or 'val'}",
                percent(scores["t2i_r1"]),
                _join(kept, sure, chance),
            )
        )
    lines += among_1000_headline(scores)
    if summary.steps:
        left = f"about {duration(view.time_left.seconds)} left" if view.time_left else ""
        lines.append(Headline("training time", duration(summary.training_seconds), left))
    if summary.pairs_per_second is not None:
        batch = f"batches of {count(summary.batch_size)}" if summary.batch_size else ""
        lines.append(Headline("speed", f"{count(summary.pairs_per_second)} pairs/s", batch))
    if (peak := summary.peak_memory_bytes) is not None:
        whole = f"of {size(view.machine_memory)}" if view.machine_memory else ""
        lines.append(Headline("peak memory", size(peak), whole))
    if summary.tower_devices:
        first, *moved = summary.tower_devices
        texts = [RunView.devices_text(RunView.devices_of(entry)) for entry in summary.tower_devices]
        moves = [
            f"then {text}, from step {entry['step']:,} on"
            for entry, text in zip(moved, texts[1:], strict=True)
        ]
        towers = " and ".join(RunView.devices_of(first)) + " tower"
        lines.append(Headline("where it ran", texts[0], "; ".join(moves) or towers))
    if (total := number(summary.started.get("parameters"))) is not None:
        lines.append(
            Headline("model", parameters(total), f"parameters, {summary.setting('model', 'name')}")
        )
    return lines


def _happened(view: RunView) -> list[Section]:
    """What a person should know first: what went wrong, what was changed, what could not be had."""
    summary, sentences, changes = view.summary, [], 0
    for event in summary.incidents:
        texts = messages(event, with_step=True)
        if event["type"] == "fell_back":
            changes += 1  # the charts mark where it was
            texts = [f"change {changes}, after step {count(event.get('step'))}: {message(event)}"]
        if event["type"] not in ("paused", "went_on"):
            # The name of a file or a setting stays as it is written.
            sentences += [
                text[:1].upper() + text[1:] if text.split(" ")[0].isalpha() else text
                for text in texts
            ]
    if view.state == "died":
        sentences.append(
            f"It ended without a word after step {count(summary.step)}. Go on: {command('resume', view.name)}"
        )
    if not summary.steps:
        sentences.append("No step has been recorded yet. Make the report again later.")
    return [Section("What happened", [Sentences(sentences)])] if sentences else []


def _metrics(summary: Summary) -> list[Section]:
    """Recall both ways beside chance."""
    scores = summary.scores
    if number(scores.get("t2i_r1")) is None:
        return []
    recall = recall_table({}, scores)
    finished = summary.ending.get("type") == "finished"
    kept = "The best model so far"
    if summary.progress.best_step:
        kept = f"The model of step {summary.progress.best_step:,}, which is kept"
    whose = f"{kept}, on the validation pairs"
    if finished and scores.get("split") == "val":
        whose = f"{kept}, on the pairs it was chosen by"
    elif finished:
        whose = f"{kept}, on pairs that had no part in choosing it"
    about = f"{whose}: {count(scores.get('candidates'))} candidates, split {scores.get('split') or 'unknown'}."
    asked = short_question_blocks(mapping(summary.ending.get("short_questions")))
    return [Section("Held-out metrics", [Sentences([about]), recall, *asked])]


def _pictures(summary: Summary, folder: Path) -> list[Section]:
    """Show some held-out images of the run and what the model answers to their captions."""
    events = [event for event in summary.probes if mappings(event.get("answers"))]
    if not events:
        return []
    rows = []
    for answer in mappings(events[-1]["answers"])[:MAX_CAPTIONS]:
        own = number(answer.get("right"))
        images = []
        if own is not None:
            rank = f"its own image, ranked {count(answer.get('rank'))}"
            images.append(ReportImage(folder / f"{own:.0f}.png", rank, right=True))
        for match in mappings(answer.get("top"))[:MAX_MATCHES]:
            at = number(match.get("picture"))
            if at is not None and at != own:
                score = significant(match.get("score"))
                images.append(ReportImage(folder / f"{at:.0f}.png", score))
        rows.append((str(answer.get("caption")), images))
    explanation = (
        f"Captions that the model was not trained on, as it answered after step "
        f"{count(events[-1].get('step'))}: the caption's own image first, then the images that it "
        "finds most similar, with their similarities."
    )
    return [Section("Some of its pictures", [Gallery("Held-out captions", explanation, rows)])]


def _choices(summary: Summary) -> list[Section]:
    """Each automatic choice with its reason, and every setting."""
    blocks: list[Block] = []
    reasons = _about(summary, "reasons")
    if reasons:
        rows = [[name, _value(summary, name), str(reason)] for name, reason in reasons.items()]
        blocks.append(Table(["setting", "choice", "reason"], [[*row] for row in rows]))
        blocks.append(
            Sentences(["Any of them can be set by hand: lapclip train --set SETTING=VALUE."])
        )
    config = _about(summary, "config")
    settings = [
        [f"{section}.{name}", str(value)]
        for section, values in config.items()
        if isinstance(values, dict)
        for name, value in values.items()
    ]
    if settings:
        blocks.append(
            Table(["setting", "value"], [[*row] for row in settings], folded="All settings")
        )
    return [Section("Choices and their reasons", blocks)] if blocks else []


def _machine(summary: Summary) -> list[Section]:
    """The computer, the versions, the commit."""
    rows = machine_rows(_about(summary, "machine"))
    rows += [
        [f"{name} version", str(version)] for name, version in _about(summary, "versions").items()
    ]
    if summary.started.get("commit"):
        rows.append(["commit", str(summary.started["commit"])])
    for entry in summary.tower_devices:
        since = f" from step {entry['step']:,} on" if len(summary.tower_devices) > 1 else ""
        devices = RunView.devices_of(entry)
        rows += [[f"{tower} tower", f"ran on {device}{since}"] for tower, device in devices.items()]
    rows += [[f"pairs to {use}", count(pairs)] for split, pairs in _about(summary, "pairs").items()
             for use in [{"train": "train on"}.get(split, f"score on, {split}")]]  # fmt: skip
    return (
        [Section("Machine and versions", [Table(["", ""], [[*row] for row in rows])])]
        if rows
        else []
    )


def machine_rows(machine: dict[str, Any]) -> list[list[str]]:
    """Facts of a machine, as rows."""
    shown = {"memory_bytes": ("memory", size), "cores": ("cores", count)}
    rows = []
    for name, value in machine.items():
        title, text = shown.get(name, (name, str))
        if isinstance(value, str | int | float):
            rows.append([title, text(value)])
    return rows


def _about(summary: Summary, name: str) -> dict[str, Any]:
    """A field of the started event that should be a dictionary."""
    return mapping(summary.started.get(name))


def _value(summary: Summary, name: str) -> str:
    """A setting by its whole name."""
    section, _, setting = name.partition(".")
    value = summary.setting(section, setting)
    return UNKNOWN if value is None else str(value)


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)

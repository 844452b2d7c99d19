"""`lapclip report --share`: what a training run measured on which machine, with nothing in it about a person.

Paths, the names of runs, folders and computers, captions and other free text stay out: every field is a number, a word
from a list of lapclip's own, or what the system says of its hardware and releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lapclip.config import SECTIONS, recipe_names
from lapclip.errors import RunError
from lapclip.model.shapes import SHAPES
from lapclip.results import (
    FLICKR8K,
    FORMAT,
    LONGEST_TEXT,
    NOT_SHARED,
    OWN,
    RESULTS,
    RUN,
    SCENES,
    check_shape,
    sealed,
    shared_machine,
)
from lapclip.runs.events import mapping
from lapclip.runs.folder import find_run
from lapclip.runs.summary import Summary
from lapclip.runs.view import RunView, view_of
from lapclip.suggest import DRAWN, command
from lapclip.text import number, one_line

FLICKR8K_IMAGES = {"train": 6_000, "val": 1_000}
"""The authors' splits (Hodosh, Young and Hockenmaier, JAIR 47, 2013)."""
CAPTIONS_EACH = (4.9, 5.0)
"""Captions of an image there: five, few of them twice."""
CHOICES = (
    "dtype",
    "image_attention",
    "text_attention",
    "linear",
    "compile",
    "threads",
    "loader_threads",
    "micro_batch",
)
"""Settings of `train` by which a machine computes the same faster."""
RECALLS = tuple(f"{way}_r{rank}" for way in ("t2i", "i2t") for rank in (1, 5, 10))


def share_run(name: str | None) -> dict[str, Any]:
    """What can be shared of a run, the newest if not named, with its checksum. RunError where there is
    nothing."""
    run = find_run(name)
    saved = run.read_settings()
    view = view_of(run)
    summary = view.summary
    if view.working:
        raise RunError(f"{run.name} is still going on, so its times are not known.", hint=command("watch", run.typed))
    if not summary.steps or any(number(summary.scores.get(recall)) is None for recall in RECALLS):
        raise RunError(f"{run.name} was never scored, so there is nothing to share.", hint=run.resume_command())
    if moved := _moved(summary):
        raise RunError(
            f"{run.name} {moved}, so its times are those of neither.", hint=f"a new run: {run.train_again()}"
        )
    started = summary.started
    about = mapping(saved.get("run"))
    versions = mapping(started.get("versions"))
    joules = summary.joules()
    name_of_model = str(summary.setting("model", "name"))
    found = {
        "format": FORMAT,
        "kind": RUN,
        "machine": shared_machine(mapping(started.get("machine"))),
        "devices": {kind: _short(label) for kind, label in mapping(started.get("hardware")).items()},
        "lapclip": _short(versions.get("lapclip", "unknown")),
        "torch": _short(versions.get("torch", "unknown")),
        "commit": _short(started["commit"]) if started.get("commit") else None,
        "data": _data(summary),
        "pairs": {split: n for split, n in mapping(started.get("pairs")).items() if split in ("train", "val", "test")},
        "recipe": about.get("recipe") if about.get("recipe") in recipe_names() else OWN,
        "changed": _changed(mapping(about.get("asked"))),
        "start": _start(summary),
        "model": name_of_model if name_of_model in SHAPES else OWN,
        "parameters": int(number(started.get("parameters")) or 0),
        "batch_size": summary.batch_size,
        "towers": view.devices,
        "choices": {name: summary.setting("train", name) for name in CHOICES},
        "ranks": machines.count if (machines := summary.machines()) else 1,
        "state": view.state,
        "step": summary.step,
        "steps": summary.total_steps,
        "set_up_seconds": round(sum(filter(None, map(number, mapping(started.get("set_up_seconds")).values()))), 3),
        "training_seconds": round(summary.training_seconds, 3),
        "pairs_per_second": summary.pairs_per_second,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "joules": joules.y[-1] if joules else None,
        "evaluations": _evaluations(summary),
        "evaluation": {
            "split": _short(summary.scores.get("split") or "val"),
            "candidates": int(number(summary.scores.get("candidates")) or 0),
            "chance": number(summary.scores.get("chance")),
            **{recall: summary.scores[recall] for recall in RECALLS},
        },
    }
    try:
        check_shape(found, RESULTS[RUN])
    except ValueError as error:  # events may come from elsewhere, or be damaged
        raise RunError(f"{run.events} cannot be shared: {one_line(error)}.", hint=run.train_again()) from None
    return sealed(found)


def _moved(summary: Summary) -> str:
    """How a run changed what it was trained on; empty where it did not."""
    began, now = summary.tower_devices[:1], summary.tower_devices[-1:]
    if began != now:
        devices = (RunView.devices_text(RunView.devices_of(entry)) for entry in (*began, *now))
        return "was trained on {}, then on {}".format(*devices)
    machines = [mapping(event.get("machine")) for event in (summary.started, *summary.resumes)]
    kinds = {(machine.get("chip"), machine.get("cores")) for machine in machines if machine}
    return "was trained on one computer, then on another" if len(kinds) > 1 else ""


def _data(summary: Summary) -> str:
    """Which data it is, by what it is made of: names of folders stay here."""
    if summary.setting("data", "source") == DRAWN:
        return SCENES
    pairs, captions = (mapping(summary.started.get(name)) for name in ("pairs", "captions"))
    least, most = CAPTIONS_EACH
    alike = all(
        pairs.get(split) == images
        and least * images <= (number(mapping(captions.get(split)).get("captions")) or 0) <= most * images
        for split, images in FLICKR8K_IMAGES.items()
    )
    return FLICKR8K if alike else OWN


def _changed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the user gave beside the recipe. Words of theirs stay here: only numbers, and values that
    lapclip itself offers, are shared. What concerns the desktop and which data it is has no part in it."""
    found = {}
    for section, values in asked.items():
        kinds = {field.name: field for field in fields(SECTIONS[section])} if section in SECTIONS else {}
        for name, value in mapping(values).items():
            if name not in kinds or section == "work" or (section, name) == ("data", "source"):
                continue
            offered = SHAPES if (section, name) == ("model", "name") else kinds[name].metadata["choices"]
            known = (
                isinstance(value, bool) or number(value) is not None or (isinstance(value, str) and value in offered)
            )
            found[f"{section}.{name}"] = value if known else NOT_SHARED
    return found


def _start(summary: Summary) -> str:
    """What the weights were at the beginning."""
    if summary.setting("train", "start"):
        return "trained weights"
    towers = [summary.setting("model", f"{tower}_from") for tower in ("image", "text")]
    return "pretrained towers" if any(towers) else "from scratch"


def _evaluations(summary: Summary) -> list[dict[str, Any]]:
    """Those that were better than all before: they tell when a recall was reached."""
    found: list[dict[str, Any]] = []
    best = {"t2i_r1": -1.0, "t2i_r10": -1.0}
    for event in summary.evaluations:
        recalls = {name: number(event["evaluation"].get(name)) for name in best}
        known = {name: value for name, value in recalls.items() if value is not None}
        if event.get("split") != "val" or len(known) < len(best):
            continue
        if any(value > best[name] for name, value in known.items()):
            found.append({"seconds": round(event["elapsed"], 3), "step": int(event["step"]), **known})
            best = {name: max(best[name], value) for name, value in known.items()}
    return found


def _short(text: Any) -> str:
    return one_line(text)[:LONGEST_TEXT] or "unknown"

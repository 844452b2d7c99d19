"""Claims about a whole training run: read from the newest finished run of the recipe, never from a shorter one, nor
from one of another size."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from lapclip.claims.judge import Finding, judged, unknown
from lapclip.claims.measured_claims import Bench
from lapclip.config import SECTIONS, DataConfig, build_config, read_recipe
from lapclip.data.loading import load_data
from lapclip.data.scenes import Scene, split_scenes
from lapclip.embedder import load
from lapclip.errors import LapclipError
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run, all_runs
from lapclip.runs.summary import summarise
from lapclip.text import number

FEW = 11
"""Wrong images beside the right one: a batch of the published run."""


@dataclass(frozen=True)
class Finished:
    """A run with what its events say."""

    run: Run
    started: dict[str, Any]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def epochs(self) -> int:
        return max(step["epoch"] for step in self.steps)

    def mean(self, field: str, epoch: int) -> float:
        """The mean of a metric over the steps of an epoch."""
        return statistics.fmean(step[field] for step in self.steps if step["epoch"] == epoch)


def newest_finished(recipe: str) -> Finished | None:
    """The newest finished run of a recipe in this folder, of the recipe's own length and shape."""
    for run in reversed(all_runs()):
        try:
            if run.recipe != recipe or run.last_state() != "finished":
                continue
        except LapclipError:  # a folder that is not readable as a run says nothing
            continue
        events = list(read_events(run.events))
        steps = {event["step"]: event for event in events if event["type"] == "step"}
        started = [event for event in events if event["type"] == "started"]
        if steps and started and _is_whole(started[-1], max(steps), recipe):
            return Finished(run, started[-1], [steps[number] for number in sorted(steps)], events)
    return None


def _is_whole(started: dict[str, Any], last: int, recipe: str) -> bool:
    """Whether a run that took this many steps has the recipe's model, pairs, batches and epochs. Precision, device,
    seed and the like are free: the claims are about what any of them gives."""
    wanted, saved = build_config([read_recipe(recipe)], SHAPES), mapping(started.get("config"))
    free = {"vocabulary", "logit_bias"}  # the tokenizer and the loss decide these
    compared = {
        "model": set(vars(wanted.model)) - free,
        "data": {"source", "train_pairs", "captions"},
        "train": {"epochs", "batch_size"},
    }
    same = all(
        mapping(saved.get(section)).get(name, value) == value  # earlier releases had fewer settings
        for section, names in compared.items()
        for name, value in vars(getattr(wanted, section)).items()
        if name in names
    )
    return same and last == wanted.train.epochs * (number(started.get("steps_per_epoch")) or 0)


def no_run(recipe: str) -> Finding:
    return unknown(
        f"no finished {recipe} run of the recipe's length and shape here: lapclip train --recipe {recipe}"
    )


def temperature(bench: Bench) -> Finding:
    """Claim 13."""
    found = newest_finished("seed")
    if found is None:
        return no_run("seed")
    epochs = _quarters(found.epochs)
    return temperature_verdict(
        {epoch: found.mean("temperature", epoch) for epoch in epochs}, found.run.name
    )


def temperature_verdict(by_epoch: dict[int, float], name: str) -> Finding:
    values = list(by_epoch.values())
    here = (
        ", ".join(f"{value:.3f}" for value in values)
        + f" in epochs {', '.join(map(str, by_epoch))}"
    )
    return judged(
        values[-1] > 1.05 * values[0], here, f"run {name}; rising means 5 % higher at the end"
    )


def gradient_balance(bench: Bench) -> Finding:
    """Claim 14: the norms of blocks and heads in the epoch two thirds through."""
    found = newest_finished("seed")
    if found is None:
        return no_run("seed")
    epoch = max(1, round(found.epochs * 2 / 3))
    rows = [
        step["grad_norms"] for step in found.steps if step["epoch"] == epoch and step["grad_norms"]
    ]
    parts = [name for name in rows[0] if name != "temperature" and not name.endswith("embedding")]
    norms = {part: statistics.fmean(row[part] for row in rows) for part in parts}
    return balance_verdict(norms, epoch, found.run.name)


def balance_verdict(norms: dict[str, float], epoch: int, name: str) -> Finding:
    low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    return judged(
        norms[high] <= 3 * norms[low],
        f"{norms[low]:.3f} ({low}) to {norms[high]:.3f} ({high}) at epoch {epoch}",
        f"run {name}; balanced means within a factor of 3, as published",
    )


def negatives(bench: Bench) -> Finding:
    """Claim 15: held-out captions against eleven wrong images that differ in many, some or few attributes."""
    found = newest_finished("seed")
    if found is None:
        return no_run("seed")
    saved = found.started["config"]
    config = DataConfig(
        **{key: value for key, value in saved["data"].items() if key in _fields("data")}
    )
    data = load_data(config, saved["model"]["image_size"])
    split, pairs = data.final
    images, texts, owner = load(found.run.path).encode_pairs(pairs)
    _, first = np.unique(owner, return_index=True)
    scenes = split_scenes(config.train_pairs, config.seed)[split]
    return negatives_verdict(
        accuracy_by_difficulty(images @ texts[first].T, scenes), found.run.name
    )


def accuracy_by_difficulty(
    scores_IT: np.ndarray, scenes: list[Scene], count: int = FEW
) -> dict[str, float]:
    """How often a caption prefers its own image to the `count` farthest, middle and nearest of the others."""
    hits: dict[str, list[bool]] = {"easy": [], "medium": [], "hard": []}
    for text, scene in enumerate(scenes):
        others = [index for index in range(len(scenes)) if index != text]
        near = sorted(others, key=lambda index: scene.differences(scenes[index]))
        middle = (len(near) - count) // 2
        chosen = {
            "easy": near[-count:],
            "medium": near[middle : middle + count],
            "hard": near[:count],
        }
        for difficulty, wrong in chosen.items():
            hits[difficulty].append(bool(scores_IT[text, text] > scores_IT[wrong, text].max()))
    return {difficulty: float(np.mean(values)) for difficulty, values in hits.items()}


def negatives_verdict(accuracy: dict[str, float], name: str) -> Finding:
    here = ", ".join(f"{difficulty} {share:.0%}" for difficulty, share in accuracy.items())
    falls = accuracy["easy"] > accuracy["medium"] > accuracy["hard"]
    return judged(
        falls, here, f"run {name}; 11 wrong images each, graded by how many of 5 attributes differ"
    )


def energy(bench: Bench) -> Finding:
    """Claim 17."""
    found = newest_finished("seed")
    if found is None:
        return no_run("seed")
    joules = summarise(found.events).joules()
    seconds = [event["training_seconds"] for event in found.events if event["type"] == "finished"][
        -1
    ]
    if not joules.y:
        return unknown(f"run {found.run.name} recorded no energy: this machine does not tell")
    if any(event.get("at_least") for event in found.events):
        return unknown(f"run {found.run.name} did not count all of its energy")
    accuracy = statistics.fmean(
        found.mean(f"{way}_accuracy", found.epochs) for way in ("t2i", "i2t")
    )
    return energy_verdict(joules.y[-1], seconds, found.epochs, accuracy, found.run.name)


def energy_verdict(
    joules: float, seconds: float, epochs: int, accuracy: float, name: str
) -> Finding:
    per_epoch, hours = joules / epochs, joules / 3600
    here = f"{joules / seconds:.0f} W, {per_epoch:,.0f} J an epoch, {100 * accuracy / hours:.1f} % accuracy per Wh"
    return judged(
        abs(per_epoch / 5460 - 1) < 0.2, here, f"run {name}, recorded while training; within 20 %"
    )


def heat(bench: Bench) -> Finding:
    """Claim 18."""
    found = newest_finished("seed")
    if found is None:
        return no_run("seed")
    degrees = [event["celsius"] for event in found.events if event.get("celsius") is not None]
    if not degrees:
        return unknown(f"run {found.run.name} recorded no temperature: this machine does not tell")
    throttled = any(event.get("throttled") for event in found.events)
    return heat_verdict(max(degrees), throttled, found.run.name)


def heat_verdict(highest: float, throttled: bool, name: str) -> Finding:
    here = f"at most {highest:.0f} C, {'throttled' if throttled else 'no throttling'}"
    return judged(highest <= 72 and not throttled, here, f"run {name}, recorded while training")


def gpu_run(bench: Bench) -> Finding:
    """Claim 24: the newest finished run of `seed-gpu`, whose towers the run itself located."""
    found = newest_finished("seed-gpu")
    if found is None:
        return (
            no_run("seed-gpu")
            if bench.accelerator
            else unknown("torch finds no accelerator here to run it on")
        )
    epoch = min(5, found.epochs)
    accuracy = statistics.fmean(found.mean(f"{way}_accuracy", epoch) for way in ("t2i", "i2t"))
    ran = [event["places"] for event in found.events if event["type"] == "finished"][-1]
    devices = {towers[tower] for towers in ran for tower in ("image", "text")}
    return gpu_run_verdict(found.mean("loss", epoch), accuracy, devices, epoch, found.run.name)


def gpu_run_verdict(
    loss: float, accuracy: float, devices: set[str], epoch: int, name: str
) -> Finding:
    here = f"loss {loss:.2f}, accuracy {accuracy:.1%} at epoch {epoch}, on {' and '.join(sorted(devices))}"
    near = abs(loss / 2.33 - 1) < 0.1 and abs(accuracy - 0.123) < 0.03
    return judged(
        near and "cpu" not in devices,
        here,
        f"run {name}; loss within 10 %, accuracy within 3 points, on a GPU",
    )


def _quarters(epochs: int) -> list[int]:
    """Epochs 1, 5, 10 and 15 of 15."""
    return sorted({1, *(max(1, round(epochs * share / 3)) for share in (1, 2, 3))})


def _fields(section: str) -> set[str]:
    return set(SECTIONS[section].__dataclass_fields__)

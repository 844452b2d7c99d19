"""Claims about a whole run: read from the newest finished run of the recipe, never from another."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

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
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.claims.finding import CannotMeasure, Finding, judge

RECIPE = "seed"
GPU_RECIPE = "seed-gpu"
WRONG_IMAGES = 11  # beside the right one: a batch of the published run
MODEL_SETTINGS_FREE = {"vocabulary", "logit_bias"}  # the tokenizer and the loss decide these
DATA_SETTINGS = {"source", "train_pairs", "captions"}
TRAIN_SETTINGS = {"epochs", "batch_size"}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, and its events."""

    run: Run
    events: list[dict[str, Any]]

    def events_of_type(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == event_type]

    @property
    def name(self) -> str:
        return self.run.name

    @cached_property
    def started(self) -> dict[str, Any]:
        return self.events_of_type("started")[-1]

    @cached_property
    def finished(self) -> dict[str, Any]:
        return self.events_of_type("finished")[-1]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The last event of each step."""
        by_number = {event["step"]: event for event in self.events_of_type("step")}
        return [by_number[step] for step in sorted(by_number)]

    @property
    def epochs(self) -> int:
        return self.steps[-1]["epoch"]

    def mean(self, metric: str, epoch: int) -> float:
        """Return the mean of a metric over the steps of an epoch."""
        return statistics.fmean(step[metric] for step in self.steps if step["epoch"] == epoch)

    def accuracy(self, epoch: int) -> float:
        """Return the mean accuracy of an epoch over both directions."""
        return (self.mean("t2i_accuracy", epoch) + self.mean("i2t_accuracy", epoch)) / 2


def find_finished_run(recipe: str) -> FinishedRun:
    """Return the newest finished run of a recipe in this folder."""
    for run in reversed(all_runs()):
        try:
            is_finished = run.recipe == recipe and run.last_state() == "finished"
        except LapclipError:  # a folder that cannot be read as a run
            continue
        if not is_finished:
            continue
        finished_run = FinishedRun(run, list(read_events(run.events)))
        if follows_recipe(finished_run, recipe):
            return finished_run
    raise CannotMeasure(
        f"no finished {recipe} run of the recipe's length and shape here: "
        f"lapclip train --recipe {recipe}"
    )


def follows_recipe(run: FinishedRun, recipe: str) -> bool:
    """Return whether a run has the recipe's model, pairs, batches and epochs.

    Precision, device, seed and the like are free: the claims are about what any of them gives.
    """
    if not run.steps or not run.events_of_type("started"):
        return False
    expected = build_config([read_recipe(recipe)], SHAPES)
    saved = mapping(run.started.get("config"))
    compared_settings = {
        "model": set(vars(expected.model)) - MODEL_SETTINGS_FREE,
        "data": DATA_SETTINGS,
        "train": TRAIN_SETTINGS,
    }
    for section, settings in compared_settings.items():
        saved_section = mapping(saved.get(section))
        for setting in settings:
            value = getattr(getattr(expected, section), setting)
            if saved_section.get(setting, value) != value:
                return False
    steps_per_epoch = number(run.started.get("steps_per_epoch")) or 0
    return run.steps[-1]["step"] == expected.train.epochs * steps_per_epoch


def measure_temperature(bench: Bench) -> dict[int, float]:
    """Return the temperature in epochs 1, 5, 10 and 15 of 15."""
    run = find_finished_run(RECIPE)
    thirds = [max(1, round(run.epochs * part / 3)) for part in (1, 2, 3)]
    return {epoch: run.mean("temperature", epoch) for epoch in sorted({1, *thirds})}


def judge_temperature(by_epoch: dict[int, float]) -> Finding:
    values = list(by_epoch.values())
    temperatures = ", ".join(f"{value:.3f}" for value in values)
    epochs = ", ".join(str(epoch) for epoch in by_epoch)
    return judge(
        values[-1] > 1.05 * values[0],
        f"{temperatures} in epochs {epochs}",
        "rising means 5 % higher at the end",
    )


def measure_gradient_norms(bench: Bench) -> dict[str, float]:
    """Return the norms of blocks and heads in the epoch two thirds through."""
    run = find_finished_run(RECIPE)
    epoch = max(1, round(run.epochs * 2 / 3))
    norms: dict[str, list[float]] = {}
    for step in run.steps:
        if step["epoch"] != epoch:
            continue
        for part, norm in (step["grad_norms"] or {}).items():
            if part != "temperature" and not part.endswith("embedding"):
                norms.setdefault(part, []).append(norm)
    return {part: statistics.fmean(values) for part, values in norms.items()}


def judge_gradient_norms(norms: dict[str, float]) -> Finding:
    smallest, largest = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    return judge(
        norms[largest] <= 3 * norms[smallest],
        f"{norms[smallest]:.3f} ({smallest}) to {norms[largest]:.3f} ({largest})",
        "two thirds through the run; balanced means within a factor of 3, as published",
    )


def measure_negatives(bench: Bench) -> dict[str, float]:
    """Return the accuracy of held-out captions by the difficulty of the wrong images."""
    run = find_finished_run(RECIPE)
    saved = run.started["config"]
    fields = SECTIONS["data"].__dataclass_fields__
    config = DataConfig(**{key: value for key, value in saved["data"].items() if key in fields})
    split, pairs = load_data(config, saved["model"]["image_size"]).final
    images, texts, image_of_text = load(run.run.path).encode_pairs(pairs)
    _, first_texts = np.unique(image_of_text, return_index=True)
    scenes = split_scenes(config.train_pairs, config.seed)[split]
    return accuracy_by_difficulty(images @ texts[first_texts].T, scenes)


def accuracy_by_difficulty(
    scores: np.ndarray, scenes: list[Scene], wrong_images: int = WRONG_IMAGES
) -> dict[str, float]:
    """Return how often a caption prefers its own image to others, by how different those are.

    `scores` has a row for each image and a column for each caption.
    """
    hits: dict[str, list[bool]] = {"easy": [], "medium": [], "hard": []}
    for text, scene in enumerate(scenes):
        others = [image for image in range(len(scenes)) if image != text]
        others.sort(key=lambda image: scene.differences(scenes[image]))
        middle = (len(others) - wrong_images) // 2
        wrong = {
            "easy": others[-wrong_images:],
            "medium": others[middle : middle + wrong_images],
            "hard": others[:wrong_images],
        }
        for difficulty, images in wrong.items():
            hits[difficulty].append(bool(scores[text, text] > scores[images, text].max()))
    return {difficulty: float(np.mean(values)) for difficulty, values in hits.items()}


def judge_negatives(accuracy: dict[str, float]) -> Finding:
    return judge(
        accuracy["easy"] > accuracy["medium"] > accuracy["hard"],
        ", ".join(f"{difficulty} {share:.0%}" for difficulty, share in accuracy.items()),
        f"{WRONG_IMAGES} wrong images each, graded by how many of 5 attributes differ",
    )


@dataclass(frozen=True)
class RunEnergy:
    """Energy that a run took, and what it reached with it."""

    joules: float
    seconds: float
    epochs: int
    accuracy: float


def measure_energy(bench: Bench) -> RunEnergy:
    run = find_finished_run(RECIPE)
    joules = summarise(run.events).joules().y
    if not joules:
        raise CannotMeasure(f"run {run.name} recorded no energy: this machine does not report it")
    if any(event.get("at_least") for event in run.events):
        raise CannotMeasure(f"run {run.name} did not count all of its energy")
    seconds = run.finished["training_seconds"]
    return RunEnergy(joules[-1], seconds, run.epochs, run.accuracy(run.epochs))


def judge_energy(energy: RunEnergy) -> Finding:
    joules_per_epoch = energy.joules / energy.epochs
    accuracy_per_watt_hour = 100 * energy.accuracy / (energy.joules / 3600)
    return judge(
        abs(joules_per_epoch / 5460 - 1) < 0.2,
        f"{energy.joules / energy.seconds:.0f} W, {joules_per_epoch:,.0f} J an epoch, "
        f"{accuracy_per_watt_hour:.1f} % accuracy per Wh",
        "recorded while training; within 20 %",
    )


@dataclass(frozen=True)
class RunHeat:
    """The highest temperature in a run, in degrees Celsius."""

    highest: float
    is_throttled: bool


def measure_heat(bench: Bench) -> RunHeat:
    run = find_finished_run(RECIPE)
    degrees = [event["celsius"] for event in run.events if event.get("celsius") is not None]
    if not degrees:
        raise CannotMeasure(
            f"run {run.name} recorded no temperature: this machine does not report it"
        )
    return RunHeat(max(degrees), any(event.get("throttled") for event in run.events))


def judge_heat(heat: RunHeat) -> Finding:
    throttling = "throttled" if heat.is_throttled else "no throttling"
    return judge(
        heat.highest <= 72 and not heat.is_throttled,
        f"at most {heat.highest:.0f} C, {throttling}",
        "recorded while training",
    )


@dataclass(frozen=True)
class GpuRun:
    """What a run of the recipe `seed-gpu` reached in its first epochs, and on which devices."""

    epoch: int
    loss: float
    accuracy: float
    devices: set[str]


def measure_gpu_run(bench: Bench) -> GpuRun:
    bench.require_accelerator()
    run = find_finished_run(GPU_RECIPE)
    epoch = min(5, run.epochs)
    devices = set()
    for places in run.finished["places"]:
        devices |= {places["image"], places["text"]}
    return GpuRun(epoch, run.mean("loss", epoch), run.accuracy(epoch), devices)


def judge_gpu_run(run: GpuRun) -> Finding:
    is_near = abs(run.loss / 2.33 - 1) < 0.1 and abs(run.accuracy - 0.123) < 0.03
    devices = " and ".join(sorted(run.devices))
    return judge(
        is_near and "cpu" not in run.devices,
        f"loss {run.loss:.2f}, accuracy {run.accuracy:.1%} at epoch {run.epoch}, on {devices}",
        "loss within 10 %, accuracy within 3 points, on a GPU",
    )

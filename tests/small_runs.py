"""Runs that take a second, photos to train on, and what their events say: what tests of whole runs share."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from lapclip.commands import train as train_command
from lapclip.commands.choose_recipe import read_request
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run, TrainRequest, create_run, find_run
from lapclip.training.outcome import TrainOutcome
from lapclip.training.preparation import prepare
from lapclip.training.request import Callbacks
from lapclip.training.run_parts import RunParts

from .conftest import SMALL


def prepared_run(name: str, settings: dict) -> Run:
    """A run whose settings are chosen, and which no process works on."""
    run = create_run(name, "first-run", TrainRequest("first-run"))
    run.pulse.unlink()
    run.write_settings(settings)
    return run


def train(
    recipe: str,
    settings: Iterable[str] = (),
    minutes: float | None = None,
    name: str | None = None,
    **options,
) -> TrainOutcome:
    """Train in a new run."""
    request = TrainRequest(recipe, tuple(settings), minutes)
    return train_command.train(request, name, **options)


def prepared(recipe: str, settings: Iterable[str], minutes: float | None = None, *more) -> RunParts:
    """A run that is ready for its first step, without a folder."""
    return prepare(read_request(TrainRequest(recipe, tuple(settings), minutes)), *more)


def train_small(*settings: str, name: str = "run", **options) -> TrainOutcome:
    return train("first-run", [*SMALL, *settings], name=name, **options)


def events(kind: str, name: str = "run") -> list[dict]:
    return [
        event
        for event in read_events(Path("runs") / name / "events.jsonl")
        if event["type"] == kind
    ]


def losses(name: str = "run") -> dict[int, float]:
    """The last event of each step number."""
    return {event["step"]: event["loss"] for event in events("step", name)}


def stop_after(step: int, name: str | None = None) -> Callbacks:
    """Callbacks that ask the run, without a name the newest, to stop when that step is recorded: one step later."""

    def ask(event) -> None:
        if event.type == "step" and event.step == step:
            find_run(name).ask_to_stop()

    return Callbacks([ask])


def photos(folder: Path, count: int = 40) -> Path:
    """Coloured rectangles of many proportions, with their colour as one of two captions, in a text file beside each."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for at in range(count):
        name, colour = [("red", (220, 30, 30)), ("green", (30, 200, 30)), ("blue", (30, 30, 220))][
            at % 3
        ]
        noise = draw.integers(0, 30, (40 + at, 60, 3))
        Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(
            folder / f"{at:03}.png"
        )
        (folder / f"{at:03}.txt").write_text(
            f"a {name} wall number {at}\n{name} paint, {at}\n", encoding="utf-8"
        )
    return folder


def write_photos(folder: Path, splits: list[str]) -> Path:
    """A table of small images with two captions each."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption", "split"])
        for at, split in enumerate(splits):
            Image.fromarray(draw.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(
                folder / f"{at}.png"
            )
            writer.writerows(
                [f"{at}.png", f"{words} number {at}", split] for words in ("a thing", "the thing")
            )
    return folder


def write_tars(folder: Path, files: int, each: int, held_out: int = 8) -> Path:
    """Images with captions in so many tar files for training, and one to be scored on."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    counts = {f"photos-train-{at:05}.tar": each for at in range(files)} | {
        "photos-val-00000.tar": held_out
    }
    for name, count in counts.items():
        with tarfile.open(folder / name, "w") as tar:
            for at in range(count):
                image = io.BytesIO()
                Image.fromarray(draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(
                    image, "PNG"
                )
                caption = f"{'very ' * (at % 4)}small number {at} of {name[7:-4]}"
                for ending, content in (("png", image.getvalue()), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{at:04}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def write_classes(folder: Path, each: int) -> Path:
    """Images of two classes in folders of their names."""
    draw = np.random.default_rng(0)
    for name in ("red_cat", "owl"):
        (folder / name).mkdir(parents=True)
        for at in range(each):
            Image.fromarray(draw.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(
                folder / name / f"{at}.png"
            )
    return folder

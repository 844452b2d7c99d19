"""`lapclip data check` says whether captions belong to their images: true ones, shuffled ones, those of the image before."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from lapclip.commands import data, probe
from lapclip.commands.data import check_data
from lapclip.model.shapes import SHAPES
from tests.networks import tiny_text

IMAGE = "tiny-image"
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (230, 220, 30),
}
COUNT = 60


@pytest.fixture(scope="module")
def walls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Walls in colours without any order, and the colour of each."""
    folder = tmp_path_factory.mktemp("walls")
    colours = Random(0).choices(list(COLOURS), k=COUNT)
    draw = np.random.default_rng(0)
    for at, colour in enumerate(colours):
        noise = draw.integers(0, 30, (40, 40, 3))
        Image.fromarray(np.clip(noise + COLOURS[colour], 0, 255).astype(np.uint8)).save(
            folder / f"{at:03}.png"
        )
    return folder, colours


@pytest.fixture(autouse=True)
def small_towers(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two small networks in the place of those that come as packages."""
    towers = replace(
        SHAPES["towers"],
        image_from=IMAGE,
        text_from=str(tiny_text(tmp_path_factory.mktemp("text"))),
    )
    monkeypatch.setattr(probe, "SHAPES", {**SHAPES, "towers": towers})
    monkeypatch.setattr(data, "towers_installed", lambda: True)


def checked(walls: tuple[Path, list[str]], captions: list[list[str]]) -> tuple[set[str], dict]:
    """The alarms about a table with these captions of each image, and what was measured."""
    folder, _ = walls
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption"])
        writer.writerows(
            (f"{at:03}.png", caption) for at, own in enumerate(captions) for caption in own
        )
    found = check_data(str(folder), "photos", ["data.tokenizer=characters"])
    kinds = {
        finding["kind"] for finding in found["findings"] if finding["kind"].startswith("captions_")
    }
    return kinds - {"captions_cut"}, found["belonging"]


def own_captions(colours: list[str]) -> list[list[str]]:
    """Two captions of each image, no two of them the same."""
    return [
        [f"a {colour} wall {at}", f"{colour} paint in the day {at}"]
        for at, colour in enumerate(colours)
    ]


def test_true_captions_are_not_accused(walls: tuple[Path, list[str]]) -> None:
    kinds, measured = checked(walls, own_captions(walls[1]))
    assert kinds == set()
    assert measured["z"] > 4
    assert measured["images"] == COUNT


def test_captions_that_say_the_same_are_not_accused(walls: tuple[Path, list[str]]) -> None:
    kinds, measured = checked(walls, [[f"wall {at % 5}"] for at in range(COUNT)])
    assert kinds == set()
    assert measured is None


def test_data_that_is_partly_broken_is_judged_by_the_rest(walls: tuple[Path, list[str]]) -> None:
    """Training would refuse it; a check is there to say what is wrong."""
    missing = [[f"a wall that is not there {at}"] for at in range(10)]
    kinds, measured = checked(walls, [*own_captions(walls[1]), *missing])
    assert kinds == set()
    assert measured["images"] == COUNT


def test_shuffled_captions_are_found(walls: tuple[Path, list[str]]) -> None:
    shuffled = Random(1).sample(own_captions(walls[1]), COUNT)
    assert checked(walls, shuffled)[0] == {"captions_unrelated"}


def test_captions_of_the_image_before_are_found(walls: tuple[Path, list[str]]) -> None:
    captions = own_captions(walls[1])
    assert checked(walls, [captions[-1], *captions[:-1]])[0] == {"captions_unrelated"}

"""The built-in data: small scenes described by attributes, their captions, and an honest split.

A scene is a thing in a colour, a number, a position and a setting. There are 5,760 of them. Held-out scenes are
combinations that training never sees; they come in grids, so that each has at least 8 neighbours among the candidates
that differ from it in one attribute only: a model must get every attribute right to find the right one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import attrgetter
from random import Random

from lapclip.errors import ConfigError

ALPHABET = "abcdefghijklmnopqrstuvwxyz ,.-"
"""Every character that a caption may hold."""

THINGS = {
    "nature": ("tree", "flower", "mushroom", "cactus", "mountain"),
    "animals": ("cat", "duck", "fish", "snail", "butterfly"),
    "urban": ("house", "taxi", "bus", "tower", "lamp"),
    "food": ("apple", "cake", "pizza", "lollipop", "ice-cream"),
}
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
COUNTS = (1, 2, 3)
POSITIONS = ("left", "middle", "right")
SETTINGS = ("noon", "sunset", "night", "snow")

HELD_OUT_GRIDS = {
    "nature": (5, 3, 2, 2, 1),
    "animals": (3, 5, 1, 2, 2),
    "urban": (2, 5, 2, 1, 3),
    "food": (1, 5, 2, 2, 3),
}
"""Values of thing, colour, count, position and setting in a held-out grid: 60 scenes with 8 neighbours each."""

_PLURALS = {"cactus": "cacti", "fish": "fish", "butterfly": "butterflies", "bus": "buses"}
_COUNT_WORDS = {1: ("a", "one", "just one"), 2: ("two", "a pair of"), 3: ("three", "a trio of")}
_POSITION_WORDS = {
    "left": ("on the left", "at the left", "to the left"),
    "middle": ("in the middle", "in the centre", "mid-way"),
    "right": ("on the right", "at the right", "to the right"),
}
_SETTING_WORDS = {
    "noon": ("at noon", "at mid-day", "in bright sun"),
    "sunset": ("at sunset", "at dusk", "in the evening"),
    "night": ("at night", "by moonlight", "on a quiet night"),
    "snow": ("in the snow", "in winter", "on a frozen day"),
}
_SENTENCES = (
    "{things} {position}, {setting}.",
    "{things} {setting}, {position}.",
    "{setting}, {things} {position}.",
    "{position}, {things} {setting}.",
)


@dataclass(frozen=True)
class Scene:
    """What a caption names. Everything else in the image is jitter."""

    category: str
    thing: str
    colour: str
    count: int
    position: str
    setting: str

    def differences(self, other: Scene) -> int:
        """In how many attributes two scenes differ; the category goes with the thing."""
        return sum(
            mine != theirs
            for mine, theirs in zip(_ATTRIBUTES(self), _ATTRIBUTES(other), strict=True)
        )


_ATTRIBUTES = attrgetter("thing", "colour", "count", "position", "setting")


def all_scenes(category: str) -> list[Scene]:
    """Every scene of a category."""
    axes = itertools.product(THINGS[category], COLOURS, COUNTS, POSITIONS, SETTINGS)
    return [Scene(category, *attributes) for attributes in axes]


def split_scenes(train_count: int, seed: int) -> dict[str, list[Scene]]:
    """Distinct scenes for training, validation and test; no held-out combination is ever trained on."""
    random = Random(f"split {seed}")
    held_out: dict[str, list[Scene]] = {"val": [], "test": []}
    for category, counts in HELD_OUT_GRIDS.items():
        taken: set[Scene] = set()
        for scenes in held_out.values():
            grid = _grid(category, counts, random)
            while taken.intersection(grid):
                grid = _grid(category, counts, random)
            taken.update(grid)
            scenes.extend(grid)
    excluded = {scene for scenes in held_out.values() for scene in scenes}
    rest = [scene for category in THINGS for scene in all_scenes(category) if scene not in excluded]
    if train_count > len(rest):
        raise ConfigError(
            f"data.train_pairs {train_count} is more than there are scenes to train on, {len(rest)}."
        )
    return {"train": _shuffled(rest, random)[:train_count], **held_out}


def describe(scene: Scene, random: Random) -> str:
    """A caption that names every attribute, in words drawn at random."""
    count = _draw(_COUNT_WORDS[scene.count], random)
    if count == "a" and scene.colour[0] in "aeiou":
        count = "an"
    thing = scene.thing if scene.count == 1 else _PLURALS.get(scene.thing, f"{scene.thing}s")
    position, setting = (
        _draw(_POSITION_WORDS[scene.position], random),
        _draw(_SETTING_WORDS[scene.setting], random),
    )
    return _draw(_SENTENCES, random).format(
        things=f"{count} {scene.colour} {thing}", position=position, setting=setting
    )


def captions(scene: Scene, count: int, random: Random) -> tuple[str, ...]:
    """Several different captions of one scene."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[describe(scene, random)] = None
    return tuple(found)


def _grid(category: str, counts: tuple[int, ...], random: Random) -> list[Scene]:
    axes = (THINGS[category], COLOURS, COUNTS, POSITIONS, SETTINGS)
    chosen = [_shuffled(axis, random)[:count] for axis, count in zip(axes, counts, strict=True)]
    return [Scene(category, *attributes) for attributes in itertools.product(*chosen)]


# Python promises the same `random()` for a seed in every release; it does not promise that of `choice` and `shuffle`.
def _draw(options, random: Random):
    return options[int(random.random() * len(options))]


def _shuffled(items, random: Random) -> list:
    keys = [random.random() for _ in items]
    return [items[index] for index in sorted(range(len(items)), key=keys.__getitem__)]

from __future__ import annotations

import hashlib
from random import Random

import numpy as np
import pytest

from lapclip.config import DataConfig
from lapclip.data.scenes import scene as scenes
from lapclip.data.scenes.dataset import load_scenes
from lapclip.data.scenes.drawing import draw
from lapclip.errors import ConfigError


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_scenes_are_distinct_and_never_trained_on(seed: int) -> None:
    splits = scenes.split_scenes(5000, seed)
    everything = [scene for split in splits.values() for scene in split]
    assert {name: len(split) for name, split in splits.items()} == {"train": 5000, "val": 240, "test": 240}
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_held_out_scene_has_eight_near_candidates(seed: int) -> None:
    for split in ("val", "test"):
        members = scenes.split_scenes(216, seed)[split]
        near = [sum(scene.differences(other) == 1 for other in members) for scene in members]
        assert min(near) >= 8


def test_every_attribute_value_is_trained_on() -> None:
    for count in (216, 5000):
        train = scenes.split_scenes(count, 0)["train"]
        assert {scene.thing for scene in train} == {thing for things in scenes.THINGS.values() for thing in things}
        assert {scene.colour for scene in train} == set(scenes.COLOURS)
        assert {(scene.count, scene.place, scene.setting) for scene in train} == {
            (count, place, setting) for count in scenes.COUNTS for place in scenes.PLACES for setting in scenes.SETTINGS
        }


def test_more_scenes_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="5280"):
        scenes.split_scenes(5281, 0)


def test_captions_use_exactly_the_alphabet_and_fit() -> None:
    random = Random(0)
    train = scenes.split_scenes(5000, 0)["train"]
    captions = [caption for scene in train for caption in scenes.captions(scene, 4, random)]
    assert set("".join(captions)) == set(scenes.ALPHABET)
    assert len(scenes.ALPHABET) == 30
    assert max(map(len, captions)) <= 62
    assert len(set(captions)) > 0.99 * len(captions)


def test_captions_name_every_attribute() -> None:
    random = Random(0)
    scene = scenes.Scene("animals", "fish", "orange", 1, "left", "night")
    for caption in scenes.captions(scene, 16, random):
        assert "orange fish" in caption
        assert "left" in caption
        assert any(words in caption for words in ("night", "moonlight"))
        assert " a orange" not in f" {caption}"
    assert "pair of" in " ".join(scenes.captions(scenes.Scene("food", "cake", "red", 2, "left", "snow"), 12, random))


def test_images_differ_in_jitter_and_repeat_for_a_seed() -> None:
    scene = scenes.Scene("urban", "taxi", "red", 2, "right", "sunset")
    first, again, other = (draw(scene, 64, seed) for seed in (1, 1, 2))
    assert first.shape == (64, 64, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("attribute", ["thing", "colour", "count", "place", "setting"])
def test_each_attribute_changes_the_image(attribute: str) -> None:
    values = {"thing": "snail", "colour": "blue", "count": 3, "place": "left", "setting": "snow"}
    plain = {"category": "animals", "thing": "cat", "colour": "red", "count": 1, "place": "right", "setting": "noon"}
    changed = scenes.Scene(**{**plain, attribute: values[attribute]})
    difference = np.abs(draw(scenes.Scene(**plain), 64, 7).astype(int) - draw(changed, 64, 7)).mean()
    assert difference > 2


def test_every_thing_can_be_drawn_in_every_size() -> None:
    for category, things in scenes.THINGS.items():
        for thing in things:
            for size in (32, 288):  # beyond the tile of noise, too
                image = draw(scenes.Scene(category, thing, "white", 3, "middle", "night"), size, 0)
                assert image.shape == (size, size, 3)
                assert image.std() > 10


def test_data_is_the_same_from_the_cache_and_changes_with_the_seed() -> None:
    config = DataConfig(train_pairs=20)
    first, cached = load_scenes(config, 32), load_scenes(config, 32)
    other = load_scenes(DataConfig(train_pairs=20, seed=1), 32)
    assert first.fingerprint == cached.fingerprint != other.fingerprint
    assert np.array_equal(first.train.pixels[:], cached.train.pixels[:])
    assert first.train.captions == cached.train.captions
    assert not np.array_equal(first.train.pixels[:], other.train.pixels[:])


def test_captions_and_split_are_the_same_on_every_platform() -> None:
    """The digest was taken once; it holds wherever Python keeps its promise about random()."""
    splits = scenes.split_scenes(300, 0)
    random = Random("captions 0")
    text = "\n".join(scenes.describe(scene, random) for split in splits.values() for scene in split)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7497fe984468851b"

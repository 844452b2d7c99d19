from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from lapclip.config import DataConfig
from lapclip.data import scenes
from lapclip.data.scenes import draw_all
from lapclip.data.scenes.drawing import draw
from lapclip.data.sources.built_in import SCENES_VERSION, PixelStore, load_scenes
from lapclip.errors import ConfigError, DataError
from lapclip.paths import partial_path


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_scenes_are_distinct_and_never_trained_on(seed: int) -> None:
    splits = scenes.split_scenes(5000, seed)
    everything = [scene for split in splits.values() for scene in split]
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 5000,
        "val": 240,
        "test": 240,
    }
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
        assert {scene.thing for scene in train} == {
            thing for things in scenes.THINGS.values() for thing in things
        }
        assert {scene.colour for scene in train} == set(scenes.COLOURS)
        assert {(scene.count, scene.position, scene.setting) for scene in train} == {
            (count, position, setting)
            for count in scenes.COUNTS
            for position in scenes.POSITIONS
            for setting in scenes.SETTINGS
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
    assert "pair of" in " ".join(
        scenes.captions(scenes.Scene("food", "cake", "red", 2, "left", "snow"), 12, random)
    )


def test_images_differ_in_jitter_and_repeat_for_a_seed() -> None:
    scene = scenes.Scene("urban", "taxi", "red", 2, "right", "sunset")
    first, again, other = (draw(scene, 64, seed) for seed in (1, 1, 2))
    assert first.shape == (64, 64, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("attribute", ["thing", "colour", "count", "position", "setting"])
def test_each_attribute_changes_the_image(attribute: str) -> None:
    values = {"thing": "snail", "colour": "blue", "count": 3, "position": "left", "setting": "snow"}
    plain = {
        "category": "animals",
        "thing": "cat",
        "colour": "red",
        "count": 1,
        "position": "right",
        "setting": "noon",
    }
    changed = scenes.Scene(**{**plain, attribute: values[attribute]})
    difference = np.abs(
        draw(scenes.Scene(**plain), 64, 7).astype(int) - draw(changed, 64, 7)
    ).mean()
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


def test_a_store_is_whole_or_not_there(tmp_path: Path) -> None:
    store = PixelStore(tmp_path / "store")
    assert store.read() is None

    def failing():
        yield np.zeros((4, 4, 3), np.uint8)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        store.write(failing(), (2, 4, 4, 3), ["a", "b"])
    assert store.read() is None
    assert list(tmp_path.iterdir()) == []
    store.write([np.full((4, 4, 3), value, np.uint8) for value in (1, 2)], (2, 4, 4, 3), ["a", "b"])
    pixels, table, digest = store.read() or (None, None, None)
    assert pixels is not None
    assert pixels[:, 0, 0, 0].tolist() == [1, 2]
    assert table == ["a", "b"]
    other = PixelStore(tmp_path / "other")
    other.write([np.full((4, 4, 3), value, np.uint8) for value in (1, 3)], (2, 4, 4, 3), ["a", "b"])
    assert digest != (other.read() or (None, None, None))[2]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_process_that_is_ended_while_it_draws_leaves_nothing(tmp_path: Path) -> None:
    def ended():
        yield np.zeros((4, 4, 3), np.uint8)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    with pytest.raises(SystemExit) as end:
        PixelStore(tmp_path / "store").write(ended(), (2, 4, 4, 3), ["a", "b"])
    assert end.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_a_killed_process_drew_goes_when_another_draws(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    mine = partial_path(tmp_path / "other")
    left = mine.with_name(mine.name.replace(f".{os.getpid()}-", f".{child.pid}-"))
    for path in (mine, left):
        path.mkdir()
    PixelStore(tmp_path / "store").write([], (0, 4, 4, 3), [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "store"]


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="LAPCLIP_CACHE"):
        PixelStore(tmp_path / "file" / "store").write([], (0, 4, 4, 3), [])


DRAWN_AS = {
    1: [169.72, 123.41, 74.83, 199.16, 180.34, 128.83, 71.07, 208.26, 173.5, 126.64,
        72.87, 199.77, 180.69, 128.36, 77.48, 208.6, 186.0, 130.49, 74.71, 200.11],
}  # fmt: skip
"""By version, the weighted mean of a drawing of each thing. Add versions; never change what one of them drew."""


def test_drawings_do_not_change_without_their_version() -> None:
    """Cached drawings are found by it, so that a run would go on with images that are no longer drawn."""
    every = [(category, thing) for category, things in scenes.THINGS.items() for thing in things]
    drawn = []
    for at, (category, thing) in enumerate(every):
        colour, count = scenes.COLOURS[at % 8], scenes.COUNTS[at % 3]
        scene = scenes.Scene(
            category, thing, colour, count, scenes.POSITIONS[at // 3 % 3], scenes.SETTINGS[at % 4]
        )
        drawn.append((draw(scene, 32, at) @ np.array([1, 2, 3]) / 6).mean())
    # Other releases of Pillow may round a pixel otherwise.
    assert drawn == pytest.approx(DRAWN_AS[SCENES_VERSION], abs=0.1), "raise SCENES_VERSION"


@pytest.mark.parametrize("dies", [False, True])
def test_several_processes_draw_what_one_draws(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    rows = scenes.split_scenes(11, 0)["train"]
    if dies:  # whatever a process does not deliver is drawn here
        monkeypatch.setattr(
            draw_all,
            "python",
            lambda *_: [sys.executable, "-c", "import sys; sys.stdout.write('x')"],
        )
    alone, shared = (list(draw_all.draw_all(rows, 24, 5, processes)) for processes in (1, 3))
    assert len(alone) == len(shared) == 11
    for at, (one, other) in enumerate(zip(alone, shared, strict=True)):
        assert np.array_equal(one, other)
        assert np.array_equal(one, draw(rows[at], 24, 5 + at))

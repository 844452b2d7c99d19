"""The built-in scenes as a data set: drawn once and kept in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.pixels import PixelStore
from lapclip.data.scenes import drawing, things
from lapclip.data.scenes import scene as scenes
from lapclip.paths import cache_folder
from lapclip.progress import DataProgress


def load_scenes(config: DataConfig, side: int, progress: DataProgress | None = None) -> DataSet:
    """The built-in data at one image size, drawn on first use."""
    splits = scenes.split_scenes(config.train_pairs, config.seed)
    store = PixelStore(cache_folder() / f"scenes-{_key(config, side)}")
    rows = [scene for split in splits.values() for scene in split]
    made = store.read()
    if made is None:
        words = Random(f"captions {config.seed}")
        table = [
            scenes.captions(scene, config.captions if split == "train" else 1, words)
            for split, members in splits.items()
            for scene in members
        ]
        store.write(_images(rows, side, config.seed, progress), (len(rows), side, side, 3), table)
        made = store.read()
        assert made is not None
    pixels, table, digest = made
    tables, first = {}, 0
    for split, members in splits.items():
        last = first + len(members)
        tables[split] = Pairs(pixels[first:last], table[first:last])
        first = last
    return DataSet(tables, digest[:16], scenes.ALPHABET)


def _images(rows: list[scenes.Scene], side: int, seed: int, progress: DataProgress | None) -> Iterator[np.ndarray]:
    for index, scene in enumerate(rows):
        yield drawing.draw(scene, side, seed * len(rows) + index)
        if progress:
            progress(index + 1, len(rows))


def _key(config: DataConfig, side: int) -> str:
    """Changes with the settings and with the code that draws, so that an old store is never taken for the new data."""
    digest = hashlib.sha256(f"{config.source} {config.seed} {config.train_pairs} {config.captions} {side}".encode())
    for module in (scenes, drawing, things):
        digest.update(Path(module.__file__ or "").read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]

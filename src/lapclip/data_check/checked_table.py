"""The table that is surveyed: what a source says, or the built-in scenes as if they were files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lapclip.config import Config, DataConfig
from lapclip.data.sources import read_table
from lapclip.data.splits import assign_splits
from lapclip.data.table import Row, Table
from lapclip.progress import Progress

SCENES = "scenes"


@dataclass(frozen=True)
class Surveyed:
    """A table with a split for each row, and the alphabet of the captions where the source declares it."""

    table: Table
    splits: Sequence[str]
    alphabet: str | None = None


@dataclass(frozen=True)
class DrawnImage:
    """A drawn scene as the file it could be."""

    name: str
    pixels: np.ndarray

    def stamp(self) -> str:
        return self.name

    def read(self) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.asarray(self.pixels)).save(file, "PNG", compress_level=1)
        return file.getvalue()


def open_table(config: Config, progress: Progress | None = None) -> Surveyed:
    """The images, captions and splits of `config.data.source`."""
    if config.data.source == SCENES:
        return _drawn(config.data, config.model.image_size, progress)
    table = read_table(config.data)
    return Surveyed(table, assign_splits(table.rows, config.data.seed))


def _drawn(config: DataConfig, side: int, progress: Progress | None) -> Surveyed:
    from lapclip.data.scenes.dataset import load_scenes  # brings torch

    data = load_scenes(config, side, progress and (lambda done, total, what="", /: progress(done, total)))
    rows = [
        Row(DrawnImage(f"{split} {at + 1}", pairs.pixels[at]), tuple(pairs.captions[at]), split)
        for split, pairs in data.splits.items()
        for at in range(len(pairs))
    ]
    return Surveyed(Table(rows, SCENES, "the built-in scenes"), [row.split for row in rows], data.alphabet)

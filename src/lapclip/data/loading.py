"""From the setting `data.source` to pictures and captions that training and evaluation read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.drawn import load_scenes
from lapclip.data.pairs import DataSet, Pairs
from lapclip.data.pixels import Progress, fit_picture, open_picture
from lapclip.data.sources import read_table
from lapclip.data.splits import assign_splits
from lapclip.data.table import PictureFile, Row

SCENES = "scenes"


def load_data(config: DataConfig, side: int, progress: Progress | None = None) -> DataSet:
    """The data a run learns from and is scored on, its pictures ready for a model that sees `side` pixels."""
    if config.source == SCENES:
        return load_scenes(config, side, progress)
    table = read_table(config)
    splits = assign_splits(table.rows, config.seed)
    found = {
        split: _pairs([row for row, own in zip(table.rows, splits, strict=True) if own == split], side)
        for split in dict.fromkeys(splits)
    }
    contents = json.dumps([[row.picture.name, row.captions, row.split] for row in table.rows])
    return DataSet(found, hashlib.sha256(contents.encode()).hexdigest()[:16], notes=[table.how])


def _pairs(rows: Iterable[Row], side: int) -> Pairs:
    rows = list(rows)
    pictures = [row.picture.path for row in rows if isinstance(row.picture, PictureFile)]
    pixels = [fit_picture(open_picture(path), side) for path in pictures]
    return Pairs(np.stack(pixels), [row.captions for row in rows])

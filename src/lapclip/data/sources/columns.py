"""Tables in text files: a picture and a caption a line, under any separator and any names."""

from __future__ import annotations

import csv
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.table import PictureFile, Row, Table


def read_csv(path: Path, config: DataConfig) -> Table:
    """The rows of a CSV file, one a picture."""
    captions: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            captions.setdefault(line["filepath"], []).append(line["caption"])
            splits[line["filepath"]] = line.get("split", "")
    rows = [
        Row(PictureFile(path.parent / name, name), tuple(options), splits[name]) for name, options in captions.items()
    ]
    return Table(rows, path.name, f"{path.name}: pictures in filepath, captions in caption")

"""Tables in JSON lines, as Hugging Face's imagefolder has them, and JSON lists of the same: an object an image."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lapclip.config import DataConfig
from lapclip.data.find_images import candidate_folders
from lapclip.data.guess_columns import NotATable, guess_named
from lapclip.data.sources.csv_tables import SAMPLE, several
from lapclip.data.sources.files import Lines
from lapclip.data.sources.registry import Files, TableFormat, register
from lapclip.data.table import RowCollector


@register
class JsonLines(TableFormat):
    """A JSON object a line."""

    endings = (".jsonl", ".ndjson")
    metadata = "metadata.jsonl"
    usual_names = re.compile(r"captions\.jsonl", re.IGNORECASE)
    table_endings = (".jsonl", ".ndjson")

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        ((path, split),) = files.paths()
        return read_json_lines(path, files.root, config, collector, split)


class Fault(str):
    """Why there is no object here."""


Record = tuple[str, Any]
"""Where it is, and what is there, or the fault."""


def read_json_lines(path: Path, root: Path, config: DataConfig, collector: RowCollector, split: str = "") -> str:
    """Collect the rows of a file with a JSON object a line. Returns what was guessed, for the user."""
    lines = Lines(path)
    how = add_records(path, root, config, collector, lambda: _parsed(path.name, lines), split)
    return "; ".join([how, *lines.notes()])


def _parsed(name: str, lines: Lines) -> Iterator[Record]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError):
            yield where, Fault("the line is too long to be a row" if number in lines.cut else "not a line of JSON")


def add_records(
    path: Path,
    root: Path,
    config: DataConfig,
    collector: RowCollector,
    records: Callable[[], Iterable[Record]],
    split: str = "",
) -> str:
    """Collect objects that each name an image and its captions. `records` gives a fresh iterator over them."""
    sample = [found for _, found in islice(records(), SAMPLE) if isinstance(found, dict)]
    if not sample:
        raise NotATable(
            f"{path.name} has no JSON objects in its first rows.",
            hint='lines such as {"file_name": "a.jpg", "text": "a dog"}',
        )
    names = list(dict.fromkeys(key for found in sample for key in found))
    rows = [[flat(found.get(name)) for name in names] for found in sample]
    columns = guess_named(names, rows, candidate_folders(path, root, config), config, path.name)
    name_key, split_key = names[columns.image], None if columns.split is None else names[columns.split]
    for where, found in records():
        if not isinstance(found, dict):
            collector.skip(where, found if isinstance(found, Fault) else "not a JSON object")
            continue
        name = found.get(name_key)
        if isinstance(name, int) and not isinstance(name, bool) and abs(name) < 10**18:
            name = str(name)
        image = columns.folder.find(name) if isinstance(name, str) else f"{name_key} is no text"
        own = found.get(split_key) if split_key else None
        own = own if isinstance(own, str) else split
        for column in columns.captions:
            for caption in captions_in(found.get(names[column])):
                if isinstance(caption, str):
                    collector.add(image, caption, own, where)
                else:
                    collector.skip(where, f"{names[column]} is no text")
    return columns.summary()


def captions_in(value: Any) -> Iterable[str | None]:
    """The captions that a JSON value holds: a text, or a list of texts or of objects with one. None is no caption."""
    if isinstance(value, str):
        return several(value)
    if isinstance(value, list) and value:
        return [_text(item) for item in value]
    return [_text(value)]


def _text(item: Any) -> str | None:
    if isinstance(item, dict):
        item = next((item[key] for key in ("raw", "caption", "text", "sentence") if key in item), None)
    return item if isinstance(item, str) else None


def flat(value: Any) -> str:
    """A value as a cell from which columns can be guessed."""
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        return _text(value) or ""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return str(value)
    return value if isinstance(value, str) else ""

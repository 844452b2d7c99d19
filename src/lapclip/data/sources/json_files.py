"""JSON: tables in JSON lines, as Hugging Face's imagefolder has them, and files that hold a whole data set.

The latter are COCO's captions, Karpathy's splits, a list of objects, or captions by name.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lapclip.config import DataConfig
from lapclip.data.find_images import ImageFinder, best_folder, candidate_folders, is_image
from lapclip.data.guess_columns import NotATable, guess_named
from lapclip.data.sources.csv_tables import SAMPLE, several
from lapclip.data.sources.files import Lines, decode
from lapclip.data.sources.registry import (
    FileFormat,
    Files,
    Form,
    Specificity,
    TableFormat,
    register,
)
from lapclip.data.table import ImageFile, RowCollector
from lapclip.paths import parse_json, read_bytes


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


def read_json_lines(
    path: Path, root: Path, config: DataConfig, collector: RowCollector, split: str = ""
) -> str:
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
            yield (
                where,
                Fault(
                    "the line is too long to be a row"
                    if number in lines.cut
                    else "not a line of JSON"
                ),
            )


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
    name_key, split_key = (
        names[columns.image],
        None if columns.split is None else names[columns.split],
    )
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
        item = next(
            (item[key] for key in ("raw", "caption", "text", "sentence") if key in item), None
        )
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


KINDS = {
    "coco": "COCO captions",
    "karpathy": "Karpathy splits",
    "list": "JSON list",
    "names": "JSON by name",
}

_USUAL = re.compile(r"(captions[^/]*|dataset(?!_info|_dict)[^/]*|[^/]*karpathy[^/]*)\.json")
"""Names that such files usually have."""


@register
class JsonAnnotations(FileFormat):
    """One JSON file for the whole data set, or one a split."""

    endings = (".json",)
    name_says_split = True

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        near = [name for name in names if name.count("/") <= 1]
        top = [name for name in names if "/" not in name and name.lower().endswith(self.endings)]
        yield Form(
            Specificity.ANNOTATIONS,
            [name for name in near if _USUAL.fullmatch(posixpath.basename(name))],
        )
        yield Form(
            Specificity.JSON, [name for name in top if not _USUAL.fullmatch(name)], sure=False
        )

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        ((path, split),) = files.paths()
        return ", ".join(read_annotations(path, files.root, config, collector, split))


def read_annotations(
    path: Path, root: Path, config: DataConfig, collector: RowCollector, split: str = ""
) -> tuple[str, str]:
    """Collect the rows of a JSON file. Returns its form and what was guessed, for the user."""
    try:
        content = parse_json(decode(read_bytes(path)))
    except OSError as error:
        why = f"{path.name} cannot be read: {error.strerror or error}."
        raise NotATable(why, hint="the same as JSON lines, which may be larger") from None
    except ValueError as error:
        if "Extra data" in str(error):  # an object a line, under the ending of a single object
            return "JSON lines", read_json_lines(path, root, config, collector, split)
        raise NotATable(f"{path.name} is not JSON that can be read: {str(error)[:120]}.") from None
    kind = _kind(content)
    if kind == "list":
        records = [
            (f"{path.name} entry {number}", found) for number, found in enumerate(content, 1)
        ]
        return KINDS[kind], add_records(path, root, config, collector, lambda: iter(records), split)
    folders = candidate_folders(path, root, config)
    if kind == "coco":
        how = _coco(content, folders, collector, path.name, split)
    elif kind == "karpathy":
        how = _karpathy(content["images"], folders, collector, path.name, split)
    elif kind == "names":
        how = _by_name(content, folders, collector, path.name, split)
    else:
        raise NotATable(
            f"{path.name} is JSON, but none of the forms that hold captions: {_shape(content)}.",
            hint="COCO captions (images and annotations), Karpathy splits, or a list of objects with a file_name",
        )
    return KINDS[kind], how


def _kind(content: Any) -> str:
    if isinstance(content, list):
        return "list" if any(isinstance(item, dict) for item in content[:100]) else ""
    if not isinstance(content, dict):
        return ""
    images, annotations = content.get("images"), content.get("annotations")
    if isinstance(images, list) and isinstance(annotations, list):
        captioned = any(isinstance(item, dict) and "caption" in item for item in annotations)
        return "coco" if captioned else "boxes"
    if isinstance(images, list) and any(
        isinstance(item, dict) and "sentences" in item for item in images
    ):
        return "karpathy"
    captioned = all(isinstance(value, str | list) for value in content.values())
    return "names" if captioned and any(map(is_image, content)) else ""


def _shape(content: Any) -> str:
    if _kind(content) == "boxes":
        return "COCO annotations without captions, such as boxes"
    if isinstance(content, dict):
        return f"an object with {', '.join(ascii(key)[1:-1][:30] for key in list(content)[:5]) or 'nothing in it'}"
    return (
        "a list without objects"
        if isinstance(content, list)
        else f"a single {type(content).__name__}"
    )


def _coco(
    content: dict, folders: list[ImageFinder], collector: RowCollector, name: str, split: str
) -> str:
    """Images by their number, and a caption an annotation."""
    files: dict[Any, str] = {}
    for at, image in enumerate(content["images"], 1):
        file = image.get("file_name") if isinstance(image, dict) else None
        number = image.get("id") if isinstance(image, dict) else None
        if not isinstance(file, str) or not _is_number(number):
            collector.skip(f"{name} image {at}", "no id or no file_name")
        elif number in files:
            collector.skip(f"{name} image {at}", "another image has the same id")
        else:
            files[number] = file
    folder, _ = best_folder(folders, list(files.values())[:64])
    captioned = set()
    for at, annotation in enumerate(content["annotations"], 1):
        where = f"{name} annotation {at}"
        number = annotation.get("image_id") if isinstance(annotation, dict) else None
        if not _is_number(number) or number not in files:
            collector.skip(where, "no image has its image_id")
            continue
        captioned.add(number)
        caption = annotation.get("caption")
        if isinstance(caption, str):
            collector.add(folder.find(files[number]), caption, split, where)
        else:
            collector.skip(where, "there is no caption")
    for number, file in files.items():
        if number not in captioned:
            collector.skip(f"{name} {file}", "no caption")
    return f"images in {_shown(folder)}"


def _karpathy(
    images: Iterable[Any],
    folders: list[ImageFinder],
    collector: RowCollector,
    name: str,
    split: str,
) -> str:
    """Images with their sentences, their split and, for COCO, their folder."""
    known = [image for image in images if isinstance(image, dict)]
    folder, _ = best_folder(
        folders, [option for image in known[:64] for option in _paths(image)[:1]]
    )
    for at, image in enumerate(images, 1):
        where = f"{name} image {at}"
        paths = _paths(image) if isinstance(image, dict) else []
        if not paths:
            collector.skip(where, "there is no filename")
            continue
        found = [folder.find(path) for path in paths]
        chosen = next((option for option in found if isinstance(option, ImageFile)), found[0])
        own = image.get("split")
        for caption in captions_in(image.get("sentences")):
            if isinstance(caption, str):
                collector.add(chosen, caption, own if isinstance(own, str) else split, where)
            else:
                collector.skip(where, "no caption")
    return f"images in {_shown(folder)}, the file's own splits"


def _paths(image: dict) -> list[str]:
    """Where the image may be: in its own folder, as COCO has them, or beside the others."""
    file, folder = image.get("filename", image.get("file_name")), image.get("filepath")
    if not isinstance(file, str):
        return []
    return [f"{folder}/{file}", file] if isinstance(folder, str) and folder else [file]


def _by_name(
    content: dict, folders: list[ImageFinder], collector: RowCollector, name: str, split: str
) -> str:
    """A caption or a list of them for each name of an image."""
    folder, _ = best_folder(folders, list(content)[:64])
    for key, value in content.items():
        for caption in captions_in(value):
            if isinstance(caption, str):
                collector.add(folder.find(key), caption, split, f"{name} {key[:80]}")
            else:
                collector.skip(f"{name} {key[:80]}", "no caption")
    return f"images in {_shown(folder)}"


def _is_number(value: Any) -> bool:
    """Whether COCO may number an image so; `true` would be taken for 1."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def _shown(folder: ImageFinder) -> str:
    return f"{folder.base.name or folder.base}/"

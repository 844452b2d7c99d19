"""JSON: tables in JSON lines, as Hugging Face's imagefolder has them, and files that hold a whole data set.

The latter are COCO's captions, Karpathy's splits, a list of objects, or captions by name.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lapclip.config import DataConfig
from lapclip.data.columns import SAMPLE_ROWS, NotATable, choose_named_columns
from lapclip.data.find_images import ImageFinder, best_folder, candidate_folders, is_image
from lapclip.data.sources.csv_tables import several
from lapclip.data.sources.files import Lines, decode
from lapclip.data.sources.registry import (
    FileFormat,
    Files,
    Form,
    Specificity,
    TableFormat,
    register,
)
from lapclip.data.table import ImageFile, RowCollector, StoredImage
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
    """Collect the rows of a file with a JSON object a line. Return its form and encoding, for the user."""
    lines = Lines(path)
    add_records(path, root, config, collector, lambda: parse_lines(path.name, lines), split)
    return "; ".join(["JSON lines", *lines.notes()])


def parse_lines(name: str, lines: Lines) -> Iterator[Record]:
    """Yield the object or the fault of each line that is not blank."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = Fault("not a line of JSON")
            if number in lines.cut:
                item = Fault("the line is too long to be a row")
        yield f"{name} line {number}", item


def add_records(
    path: Path,
    root: Path,
    config: DataConfig,
    collector: RowCollector,
    records: Callable[[], Iterable[Record]],
    split: str = "",
) -> None:
    """Collect objects that each name an image and its captions.

    `records` returns a new iterator over the objects: the first of them choose the keys to read.
    """
    sample = [item for _, item in islice(records(), SAMPLE_ROWS) if isinstance(item, dict)]
    if not sample:
        raise NotATable(
            f"{path.name} has no JSON objects in its first rows.",
            hint='lines such as {"file_name": "a.jpg", "text": "a dog"}',
        )
    names = list(dict.fromkeys(chain.from_iterable(sample)))
    rows = [[flat(item.get(name)) for name in names] for item in sample]
    folders = candidate_folders(path, root, config)
    columns = choose_named_columns(names, rows, folders, config, path.name)
    used = columns.used
    images_before = len(collector)
    for where, item in records():
        if not isinstance(item, dict):
            why = item if isinstance(item, Fault) else "not a JSON object"
            collector.skip(where, why)
            continue
        name = item.get(used.images)
        if isinstance(name, int) and not isinstance(name, bool) and abs(name) < 10**18:
            name = str(name)
        image = f"{used.images} is no text"
        if isinstance(name, str):
            image = columns.folder.find(name)
        row_split = item.get(used.split)
        if not isinstance(row_split, str):
            row_split = split
        for key in used.captions:
            add_captions(collector, image, item.get(key), row_split, where, f"{key} is no text")
    collector.columns[used] += len(collector) - images_before


def add_captions(
    collector: RowCollector,
    image: StoredImage | str,
    value: Any,
    split: str,
    where: str,
    fault: str = "no caption",
) -> None:
    """Collect the captions that a JSON value holds. `fault` is the reason to skip what is none."""
    for caption in captions_in(value):
        if caption is None:
            collector.skip(where, fault)
        else:
            collector.add(image, caption, split, where)


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
        return read_annotations(path, files.root, config, collector, split)


def read_annotations(
    path: Path, root: Path, config: DataConfig, collector: RowCollector, split: str = ""
) -> str:
    """Collect the rows of a JSON file. Return its form and where its images are, for the user."""
    try:
        content = parse_json(decode(read_bytes(path)))
    except OSError as error:
        why = f"{path.name} cannot be read: {error.strerror or error}."
        raise NotATable(why, hint="the same as JSON lines, which may be larger") from None
    except ValueError as error:
        if "Extra data" in str(error):  # an object a line, under the ending of a single object
            return read_json_lines(path, root, config, collector, split)
        raise NotATable(f"{path.name} is not JSON that can be read: {str(error)[:120]}.") from None
    kind = _kind(content)
    if kind == "list":
        records = [
            (f"{path.name} entry {number}", found) for number, found in enumerate(content, 1)
        ]
        add_records(path, root, config, collector, lambda: iter(records), split)
        return KINDS[kind]
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
    return f"{KINDS[kind]}, {how}"


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
        image_split = own if isinstance(own, str) else split
        add_captions(collector, chosen, image.get("sentences"), image_split, where)
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
        add_captions(collector, folder.find(key), value, split, f"{name} {key[:80]}")
    return f"images in {_shown(folder)}"


def _is_number(value: Any) -> bool:
    """Whether COCO may number an image so; `true` would be taken for 1."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def _shown(folder: ImageFinder) -> str:
    return f"{folder.base.name or folder.base}/"

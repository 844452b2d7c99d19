"""JSON: tables in JSON lines, as Hugging Face's imagefolder has them, and files that hold a whole data set.

The latter are COCO's captions, Karpathy's splits, a list of objects, or captions by name.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        if is_number(name):
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
    """Return the captions in a JSON value: a text, or a list of texts or of objects with one. None is no caption."""
    if isinstance(value, str):
        return several(value)
    if isinstance(value, list) and value:
        return [text_in(item) for item in value]
    return [text_in(value)]


def text_in(item: Any) -> str | None:
    """Return a text, or the text of an object. None if there is none."""
    if isinstance(item, dict):
        texts = [item[key] for key in ("raw", "caption", "text", "sentence") if key in item]
        item = texts[0] if texts else None
    return item if isinstance(item, str) else None


def flat(value: Any) -> str:
    """Return a value as a cell by which columns are chosen."""
    if isinstance(value, list) and value:
        value = value[0]
    if is_number(value):
        return str(value)
    return text_in(value) or ""


def is_number(value: Any) -> bool:
    """Return whether a value is a whole number that may name an image."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18


# Names that files of a whole data set usually have.
_USUAL = re.compile(r"(captions[^/]*|dataset(?!_info|_dict)[^/]*|[^/]*karpathy[^/]*)\.json")


@register
class JsonAnnotations(FileFormat):
    """One JSON file for the whole data set, or one for each split."""

    endings = (".json",)
    name_says_split = True

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        near = [name for name in names if name.count("/") <= 1]
        usual = [name for name in near if _USUAL.fullmatch(posixpath.basename(name))]
        yield Form(Specificity.ANNOTATIONS, usual)
        top = [name for name in names if "/" not in name and name.lower().endswith(self.endings)]
        others = [name for name in top if not _USUAL.fullmatch(name)]
        yield Form(Specificity.JSON, others, sure=False)

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
    if isinstance(content, list) and any(isinstance(item, dict) for item in content[:100]):
        entries = [(f"{path.name} entry {number}", item) for number, item in enumerate(content, 1)]
        add_records(path, root, config, collector, lambda: iter(entries), split)
        return "JSON list"

    annotations = Annotations(path.name, candidate_folders(path, root, config), collector, split)
    if isinstance(content, dict):
        if isinstance(content.get("images"), list) and any_with(
            content.get("annotations"), "caption"
        ):
            return f"COCO captions, {annotations.add_coco(content)}"
        if any_with(content.get("images"), "sentences"):
            return f"Karpathy splits, {annotations.add_karpathy(content['images'])}"
        if any(map(is_image, content)) and all(
            isinstance(value, str | list) for value in content.values()
        ):
            return f"JSON by name, {annotations.add_by_name(content)}"
    what = "none of the forms that hold captions"
    if isinstance(content, dict) and "annotations" in content:
        what = "its annotations are without captions, such as boxes"
    raise NotATable(
        f"{path.name} is JSON, but {what}.",
        hint="COCO captions (images and annotations), Karpathy splits, or a list of objects with a file_name",
    )


def any_with(items: Any, key: str) -> bool:
    """Return whether a value is a list in which an object has a key."""
    return isinstance(items, list) and any(isinstance(item, dict) and key in item for item in items)


@dataclass(frozen=True)
class Annotations:
    """A JSON file of a whole data set, whose pairs are collected."""

    name: str
    folders: Sequence[ImageFinder]
    collector: RowCollector
    split: str

    def add_coco(self, content: dict[str, Any]) -> str:
        """Collect images by their number, with the caption of each annotation."""
        files: dict[Any, str] = {}
        for number, image in enumerate(content["images"], 1):
            where = f"{self.name} image {number}"
            fields = image if isinstance(image, dict) else {}
            file, key = fields.get("file_name"), fields.get("id")
            if not isinstance(file, str) or not is_key(key):
                self.collector.skip(where, "no id or no file_name")
            elif key in files:
                self.collector.skip(where, "another image has the same id")
            else:
                files[key] = file
        folder = self.choose_folder(files.values())
        captioned = set()
        for number, annotation in enumerate(content["annotations"], 1):
            where = f"{self.name} annotation {number}"
            fields = annotation if isinstance(annotation, dict) else {}
            key, caption = fields.get("image_id"), fields.get("caption")
            if not is_key(key) or key not in files:
                self.collector.skip(where, "no image has its image_id")
                continue
            captioned.add(key)
            if isinstance(caption, str):
                self.collector.add(folder.find(files[key]), caption, self.split, where)
            else:
                self.collector.skip(where, "there is no caption")
        for key, file in files.items():
            if key not in captioned:
                self.collector.skip(f"{self.name} {file}", "no caption")
        return f"images in {folder_name(folder)}"

    def add_karpathy(self, images: Sequence[Any]) -> str:
        """Collect images with their sentences, their split and, for COCO, their folder."""
        first_paths = [paths[0] for image in images[:64] if (paths := possible_paths(image))]
        folder = self.choose_folder(first_paths)
        for number, image in enumerate(images, 1):
            where = f"{self.name} image {number}"
            matches = [folder.find(path) for path in possible_paths(image)]
            if not matches:
                self.collector.skip(where, "there is no filename")
                continue
            files = [match for match in matches if isinstance(match, ImageFile)]
            split = image.get("split")
            if not isinstance(split, str):
                split = self.split
            chosen = files[0] if files else matches[0]
            add_captions(self.collector, chosen, image.get("sentences"), split, where)
        return f"images in {folder_name(folder)}, the file's own splits"

    def add_by_name(self, content: dict[str, Any]) -> str:
        """Collect a caption or a list of captions for each name of an image."""
        folder = self.choose_folder(content)
        for name, value in content.items():
            where = f"{self.name} {name[:80]}"
            add_captions(self.collector, folder.find(name), value, self.split, where)
        return f"images in {folder_name(folder)}"

    def choose_folder(self, names: Iterable[str]) -> ImageFinder:
        """Return the folder that has most of the first images."""
        folder, _ = best_folder(self.folders, islice(names, 64))
        return folder


def possible_paths(image: Any) -> list[str]:
    """Return where an image of Karpathy's splits may be: in a folder of its own, as COCO's are, or beside the others."""
    if not isinstance(image, dict):
        return []
    file, folder = image.get("filename", image.get("file_name")), image.get("filepath")
    if not isinstance(file, str):
        return []
    if isinstance(folder, str) and folder:
        return [f"{folder}/{file}", file]
    return [file]


def is_key(value: Any) -> bool:
    """Return whether COCO may number an image with a value. True would be taken for 1."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def folder_name(folder: ImageFinder) -> str:
    """Return the name of a folder for a message."""
    return f"{folder.base.name or folder.base}/"

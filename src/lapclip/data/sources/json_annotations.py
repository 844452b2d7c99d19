"""One JSON file for a whole data set: COCO's captions, Karpathy's splits, a list of objects, or captions by name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lapclip.config import DataConfig
from lapclip.data.sources.collect_rows import Gathering
from lapclip.data.sources.guess_columns import NotATable
from lapclip.data.sources.image_files import Folder, best_folder, candidates, is_image
from lapclip.data.sources.json_lines import add_records, captions_in, read_json_lines
from lapclip.data.sources.text_encoding import decode
from lapclip.data.table import ImageFile

KINDS = {"coco": "COCO captions", "karpathy": "Karpathy splits", "list": "JSON list", "names": "JSON by name"}


def read_annotations(path: Path, root: Path, config: DataConfig, into: Gathering, split: str = "") -> tuple[str, str]:
    """Add the rows of a JSON file. Returns its form and what was guessed, for the user."""
    try:
        content = json.loads(decode(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        if "Extra data" in str(error):  # an object a line, under the ending of a single object
            return "JSON lines", read_json_lines(path, root, config, into, split)
        raise NotATable(f"{path.name} is not JSON that can be read: {str(error)[:120]}.") from None
    kind = _kind(content)
    if kind == "list":
        records = [(f"{path.name} entry {place + 1}", found) for place, found in enumerate(content)]
        return KINDS[kind], add_records(path, root, config, into, lambda: iter(records), split)
    folders = candidates(path, root, config)
    if kind == "coco":
        said = _coco(content, folders, into, path.name, split)
    elif kind == "karpathy":
        said = _karpathy(content["images"], folders, into, path.name, split)
    elif kind == "names":
        said = _by_name(content, folders, into, path.name, split)
    else:
        raise NotATable(
            f"{path.name} is JSON, but none of the forms that hold captions: {_shape(content)}.",
            hint="COCO captions (images and annotations), Karpathy splits, or a list of objects with a file_name",
        )
    return KINDS[kind], said


def _kind(content: Any) -> str:
    if isinstance(content, list):
        return "list" if any(isinstance(item, dict) for item in content[:100]) else ""
    if not isinstance(content, dict):
        return ""
    images, annotations = content.get("images"), content.get("annotations")
    if isinstance(images, list) and isinstance(annotations, list):
        captioned = any(isinstance(item, dict) and "caption" in item for item in annotations)
        return "coco" if captioned else "boxes"
    if isinstance(images, list) and any(isinstance(item, dict) and "sentences" in item for item in images):
        return "karpathy"
    captioned = all(isinstance(value, str | list) for value in content.values())
    return "names" if captioned and any(map(is_image, content)) else ""


def _shape(content: Any) -> str:
    if _kind(content) == "boxes":
        return "COCO annotations without captions, such as boxes"
    if isinstance(content, dict):
        return f"an object with {', '.join(ascii(key)[1:-1][:30] for key in list(content)[:5]) or 'nothing in it'}"
    return "a list without objects" if isinstance(content, list) else f"a single {type(content).__name__}"


def _coco(content: dict, folders: list[Folder], into: Gathering, name: str, split: str) -> str:
    """Images by their number, and a caption an annotation."""
    files: dict[Any, str] = {}
    for place, image in enumerate(content["images"]):
        file = image.get("file_name") if isinstance(image, dict) else None
        number = image.get("id") if isinstance(image, dict) else None
        if not isinstance(file, str) or not isinstance(number, int | str):
            into.skip(f"{name} image {place + 1}", "no id or no file_name")
        elif number in files:
            into.skip(f"{name} image {place + 1}", "another image has the same id")
        else:
            files[number] = file
    folder, _ = best_folder(folders, list(files.values())[:64])
    told = set()
    for place, annotation in enumerate(content["annotations"]):
        where = f"{name} annotation {place + 1}"
        number = annotation.get("image_id") if isinstance(annotation, dict) else None
        if not isinstance(number, int | str) or number not in files:
            into.skip(where, "no image has its image_id")
            continue
        told.add(number)
        caption = annotation.get("caption")
        if isinstance(caption, str):
            into.add(folder.find(files[number]), caption, split, where)
        else:
            into.skip(where, "there is no caption")
    for number, file in files.items():
        if number not in told:
            into.skip(f"{name} {file}", "no caption")
    return f"images in {_shown(folder)}"


def _karpathy(images: Iterable[Any], folders: list[Folder], into: Gathering, name: str, split: str) -> str:
    """Images with their sentences, their split and, for COCO, their folder."""
    known = [image for image in images if isinstance(image, dict)]
    folder, _ = best_folder(folders, [option for image in known[:64] for option in _paths(image)[:1]])
    for place, image in enumerate(images):
        where = f"{name} image {place + 1}"
        paths = _paths(image) if isinstance(image, dict) else []
        if not paths:
            into.skip(where, "there is no filename")
            continue
        found = [folder.find(path) for path in paths]
        picture = next((option for option in found if isinstance(option, ImageFile)), found[0])
        own = image.get("split")
        for caption in captions_in(image.get("sentences")):
            if isinstance(caption, str):
                into.add(picture, caption, own if isinstance(own, str) else split, where)
            else:
                into.skip(where, "no caption")
    return f"images in {_shown(folder)}, the file's own splits"


def _paths(image: dict) -> list[str]:
    """Where the image may be: in its own folder, as COCO has them, or beside the others."""
    file, folder = image.get("filename", image.get("file_name")), image.get("filepath")
    if not isinstance(file, str):
        return []
    return [f"{folder}/{file}", file] if isinstance(folder, str) and folder else [file]


def _by_name(content: dict, folders: list[Folder], into: Gathering, name: str, split: str) -> str:
    """A caption or a list of them for each name of an image."""
    folder, _ = best_folder(folders, list(content)[:64])
    for key, value in content.items():
        for caption in captions_in(value):
            if isinstance(caption, str):
                into.add(folder.find(key), caption, split, f"{name} {key[:80]}")
            else:
                into.skip(f"{name} {key[:80]}", "no caption")
    return f"images in {_shown(folder)}"


def _shown(folder: Folder) -> str:
    return f"{folder.base.name or folder.base}/"

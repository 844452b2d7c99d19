"""A folder of images with a text file beside each: a caption a line."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.find_images import is_image
from lapclip.data.sources.class_folders import has_classes
from lapclip.data.sources.files import decode
from lapclip.data.sources.registry import FileFormat, Files, Form, Specificity, register
from lapclip.data.splits import split_named
from lapclip.data.table import ImageFile, RowCollector

MOST_TEXT = 1_000_000
"""Bytes of a text beside an image; what is longer is no caption."""


@register
class TextFiles(FileFormat):
    """dog.txt or dog.jpg.txt beside dog.jpg."""

    label = "text files"

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        beside = len(texts_beside(names))
        # A few texts among folders of classes are no captions.
        if beside and (2 * beside > sum(map(is_image, names)) or not has_classes(names)):
            yield Form(Specificity.TEXT_FILES, names, format=self)

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        beside = texts_beside(files.names)
        images = [name for name in files.names if is_image(name)]
        for name in images:
            if name not in beside:
                collector.skip(name, "no .txt beside it")
                continue
            _add(files.root, name, beside[name], collector)
        used = set(beside.values())
        for name in files.names:
            if name.lower().endswith(".txt") and name not in used:
                collector.skip(name, "no image of that name beside it")
        return "a caption a line in the .txt beside each image"


def texts_beside(files: Sequence[str]) -> dict[str, str]:
    """The text file of each image that has one, by the image's path."""
    texts = {posixpath.splitext(name)[0]: name for name in files if name.lower().endswith(".txt")}
    found = {}
    for name in files:
        if is_image(name):
            # Both are common: dog.txt and dog.jpg.txt.
            text = texts.get(posixpath.splitext(name)[0]) or texts.get(name)
            if text:
                found[name] = text
    return found


def _add(root: Path, name: str, text: str, collector: RowCollector) -> None:
    try:
        with open(root / text, "rb") as file:
            content = file.read(MOST_TEXT + 1)
    except OSError as error:
        return collector.skip(text, f"cannot be read: {error.strerror or error}")
    if len(content) > MOST_TEXT:
        return collector.skip(text, "too long to be a caption")
    image = ImageFile(root / name, name)
    top = name.partition("/")[0] if "/" in name else ""
    split = split_named(top) or ""
    lines = [(number, line) for number, line in enumerate(decode(content).splitlines(), 1) if line.strip()]
    for number, line in lines:
        collector.add(image, line, split, f"{text} line {number}")
    if not lines:
        collector.skip(text, "the caption is empty")
    return None

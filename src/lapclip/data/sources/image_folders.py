"""A folder of images: with a text file beside each, a caption a line; or in folders named like what they show."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.find_images import is_image
from lapclip.data.sources.files import decode
from lapclip.data.sources.registry import FileFormat, Files, Form, Specificity, register
from lapclip.data.splits import split_named
from lapclip.data.table import ImageFile, RowCollector, some
from lapclip.errors import DataError

_NUMBER = re.compile(r"^\d+\s*[._-]\s*(?=\D)")


@register
class ClassFolders(FileFormat):
    """A folder a class, alone or below a folder a split."""

    label = "class folders"

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        if has_classes(names):
            yield Form(Specificity.CLASS_FOLDERS, names, format=self)

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        prompts = [prompt.strip() for prompt in config.prompts.split("|") if prompt.strip()]
        if not prompts or any("{}" not in prompt for prompt in prompts):
            raise DataError(
                "data.prompts must have {} where the name of the class goes.",
                hint="--set data.prompts='a photo of a {}.'",
            )
        images = [name for name in files.names if is_image(name)]
        with_splits = _has_splits(images)
        found = [_class_of(name, with_splits) for name in images]
        # A number in front is a class's number in a list only where each class has one; else it may be a 3-wheeler.
        numbered = all(_NUMBER.match(folder) for folder, _ in found if folder)
        classes: dict[str, None] = {}
        for name, (folder, split) in zip(images, found, strict=True):
            if not folder:
                collector.skip(name, "in no class folder")
                continue
            label = readable(folder, numbered)
            classes[label] = None
            collector.label(name, label)
            for prompt in prompts:
                collector.add(
                    ImageFile(files.root / name, name), prompt.replace("{}", label), split, name
                )
        return f"{len(classes)} classes ({some(list(classes))}); captions from data.prompts: {some(prompts)}"


def has_classes(files: Sequence[str]) -> bool:
    """Whether most of the images lie in at least two folders that can be classes."""
    images = [name for name in files if is_image(name)]
    with_splits = _has_splits(images)
    found = [_class_of(name, with_splits)[0] for name in images]
    inside = [name for name in found if name]
    return len(set(inside)) > 1 and 2 * len(inside) > len(images)


def _has_splits(images: Sequence[str]) -> bool:
    """Whether the first folders are splits, and the classes lie below them."""
    tops = {name.split("/")[0] for name in images if name.count("/") >= 2}
    return any(split_named(top) == "train" for top in tops) or (
        bool(tops) and all(split_named(top) is not None for top in tops)
    )


def _class_of(name: str, with_splits: bool) -> tuple[str, str]:
    """The class folder and the split of an image; an empty class where it lies in none."""
    parts = name.split("/")[:-1]
    if not with_splits:
        return (parts[0] if parts else ""), ""
    split = split_named(parts[0]) if parts else None
    return (parts[1], split) if split and len(parts) > 1 else ("", "")


def readable(folder: str, numbered: bool) -> str:
    """A folder's name as words: golden_retriever, GoldenRetriever and, where they are `numbered`, 001.Albatross, but
    t-shirt."""
    name = (_NUMBER.sub("", folder) if numbered else folder).replace("_", " ").replace("+", " ")
    name = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", name)
    # A hyphen beside a single letter belongs to the word, as in t-shirt and x-ray; others stand for spaces.
    name = re.sub(r"(?<!\b[A-Za-z])-(?![A-Za-z]\b)", " ", name)
    return " ".join(name.split()) or folder


MAX_TEXT_BYTES = 1_000_000  # of a text beside an image; what is longer is no caption


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
    """Collect an image with the captions of the text file beside it."""
    try:
        with open(root / text, "rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        return collector.skip(text, f"cannot be read: {error.strerror or error}")
    if len(content) > MAX_TEXT_BYTES:
        return collector.skip(text, "too long to be a caption")
    image = ImageFile(root / name, name)
    folder, _, _ = name.rpartition("/")
    split = split_named(folder.partition("/")[0]) or ""
    lines = decode(content).splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            collector.add(image, line, split, f"{text} line {number}")
    if not any(line.strip() for line in lines):
        collector.skip(text, "the caption is empty")
    return None

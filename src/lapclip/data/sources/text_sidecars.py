"""A folder of images with a text file beside each: a caption a line."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from pathlib import Path

from lapclip.data.sources.collect_rows import Gathering
from lapclip.data.sources.image_files import is_image
from lapclip.data.sources.text_encoding import decode
from lapclip.data.splits import split_named
from lapclip.data.table import ImageFile

MOST_TEXT = 1_000_000
"""Bytes of a text beside an image; what is longer is no caption."""


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


def read_sidecars(root: Path, files: Sequence[str], into: Gathering) -> str:
    """Add the images among these files that have a text beside them. Returns what was found, for the user."""
    beside = texts_beside(files)
    images = [name for name in files if is_image(name)]
    for name in images:
        if name not in beside:
            into.skip(name, "no .txt beside it")
            continue
        _add(root, name, beside[name], into)
    used = set(beside.values())
    for name in files:
        if name.lower().endswith(".txt") and name not in used:
            into.skip(name, "no image of that name beside it")
    return "a caption a line in the .txt beside each image"


def _add(root: Path, name: str, text: str, into: Gathering) -> None:
    try:
        with open(root / text, "rb") as file:
            content = file.read(MOST_TEXT + 1)
    except OSError as error:
        return into.skip(text, f"cannot be read: {error.strerror or error}")
    if len(content) > MOST_TEXT:
        return into.skip(text, "too long to be a caption")
    image = ImageFile(root / name, name)
    top = name.partition("/")[0] if "/" in name else ""
    split = split_named(top) or ""
    lines = [(number, line) for number, line in enumerate(decode(content).splitlines(), 1) if line.strip()]
    for number, line in lines:
        into.add(image, line, split, f"{text} line {number}")
    if not lines:
        into.skip(text, "the caption is empty")
    return None

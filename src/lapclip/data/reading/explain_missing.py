"""Errors for sources without data: what was expected, and what was found instead."""

from __future__ import annotations

import codecs
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lapclip.data.image_folders import LINK_OUTSIDE, is_image
from lapclip.data.table import Skipped
from lapclip.errors import DataError, closest

EXPECTED = "captions.csv, metadata.jsonl or one .txt beside each image"
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
PACKED = {
    ".zip": "unzip {0}",
    ".tar.gz": "tar -xzf {0}, or for shards: gunzip {0}",
    ".tgz": "tar -xzf {0}",
    ".tar.bz2": "tar -xjf {0}",
    ".tar.xz": "tar -xJf {0}",
    ".tar.zst": "zstd -d {0}",
    ".gz": "gunzip {0}",
    ".bz2": "bunzip2 {0}",
    ".xz": "unxz {0}",
    ".zst": "zstd -d {0}",
    ".7z": "7z x {0}",
    ".rar": "unrar x {0}",
}


def how_to_unpack(name: str) -> str:
    """The command that unpacks a compressed file; empty for any other file."""
    return next((command for ending, command in PACKED.items() if name.lower().endswith(ending)), "").format(name)


def is_foreign(path: Path) -> bool:
    """Whether a file of unknown ending is no text: it is compressed, an image, or has bytes that text never has."""
    if how_to_unpack(path.name) or is_image(path.name):
        return True
    with open(path, "rb") as file:
        start = file.read(4096)
    return not start.startswith(BYTE_ORDER_MARKS) and b"\0" in start


def no_such(source: str) -> DataError:
    path = Path(source)
    try:
        near = closest(path.name, os.listdir(path.parent))
    except (OSError, ValueError):
        near = None
    guess = f" Did you mean {path.parent / near}?" if near else ""
    return DataError(f"There is no {source}.{guess}", hint="a folder or a table, as docs/data.md lists them")


def in_file(path: Path) -> DataError:
    """A file that is none of the forms."""
    if command := how_to_unpack(path.name):
        return DataError(
            f"{path.name} is compressed. Images are read where they lie, so it has to be unpacked first.",
            hint=command,
        )
    if is_image(path.name):
        return DataError(
            f"{path.name} is a single image. Training needs many, with captions.",
            hint=f"the folder of the images, with {EXPECTED}",
        )
    return DataError(
        f"{path.name} is no form of data that is known here.",
        hint=f"a folder with {EXPECTED}; a CSV, JSON, tar or parquet file",
    )


def in_folder(root: Path, files: Sequence[str], skipped: Sequence[Skipped] = ()) -> DataError:
    """A folder without captions; `skipped` is what was left out while it was listed."""
    links = sum(left_out.why == LINK_OUTSIDE for left_out in skipped)
    if links > len(files):  # as in a snapshot of Hugging Face, whose files are elsewhere under other names
        lead = "1 link leads" if links == 1 else f"{links:,} links lead"
        return DataError(
            f"Nothing to learn from was found in {root}: {lead} out of it, and such links are not followed.",
            hint="the real folder that holds the files, or a copy with files instead of links",
        )
    if not files:
        return DataError(f"{root} is empty.", hint=f"a folder of images with {EXPECTED}")
    images = sum(map(is_image, files))
    packed = next((name for name in files if how_to_unpack(name)), None)
    if packed and not images:
        return DataError(f"{root} holds compressed files, such as {packed}.", hint=how_to_unpack(packed))
    if images:
        few = "1 image" if images == 1 else f"{images:,} images"
        return DataError(
            f"No captions found in {root}, which has {few}. Expected {EXPECTED}.",
            hint="a captions.csv beside the images, with lines such as: dog.jpg,a dog in the snow",
        )
    endings = Counter(os.path.splitext(name)[1].lower() or "no ending" for name in files)
    found = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(3))
    return DataError(f"No images found in {root}. It has other files: {found}.", hint=f"images with {EXPECTED}")

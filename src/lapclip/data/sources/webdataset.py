"""WebDataset shards: tar files whose neighbouring members share a name, an image and its caption each."""

from __future__ import annotations

import itertools
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lapclip.config import AUTO, DataConfig
from lapclip.data.image_folders import ENDINGS
from lapclip.data.reading.guess_columns import CAPTIONS, SPLITS
from lapclip.data.reading.row_collector import RowCollector
from lapclip.data.reading.tar_headers import Damaged, Member, members
from lapclip.data.reading.text_encoding import decode
from lapclip.data.sources.json_lines import captions_in
from lapclip.data.sources.registry import FileFormat, Files, Form, Specificity, register
from lapclip.data.table import ImageInTar

IMAGES = tuple(ending[1:] for ending in ENDINGS)
TEXTS = ("txt", "json")
MOST_TEXT = 1_000_000
"""Bytes of a text beside an image; what is longer is no caption."""


@register
class TarShards(FileFormat):
    """Tar files, each of the split that its path says."""

    label = "tar shards"
    endings = (".tar",)
    by_pattern = True
    unit = "shards"

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        yield Form(Specificity.SHARDS, [name for name in names if name.lower().endswith(self.endings)], format=self)

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        keys: dict[str, int] = {}
        for path, split in files.paths():
            _read_shard(path, path.relative_to(files.root).as_posix(), config, collector, split, keys)
        return f"captions in {', '.join(keys) or 'nothing'}"


def _read_shard(
    path: Path, name: str, config: DataConfig, collector: RowCollector, split: str, keys: dict[str, int]
) -> None:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        return collector.skip(name, f"cannot be read: {error.strerror or error}")
    with file:
        for _, group in itertools.groupby(_usable(path, name, collector), key=lambda member: _up_to_point(member.name)):
            pairs: dict[str, tuple[list[Member], dict[str, bytes]]] = {}
            for member in group:
                key, ending = _key(member.name)
                if ending not in (*IMAGES, *TEXTS):
                    continue
                images, texts = pairs.setdefault(key, ([], {}))
                if ending in IMAGES:
                    images.append(member)
                elif member.size <= MOST_TEXT or ending == "json":
                    file.seek(member.offset)
                    texts[ending] = file.read(min(member.size, MOST_TEXT + 1))
            for key, (images, texts) in pairs.items():
                _add_group(path, name, key, images, texts, config, collector, split, keys)
    return None


def _usable(path: Path, shard: str, collector: RowCollector) -> Iterator[Member]:
    """The members that can be read; the others are named and left out. Damage ends the shard, not the reading."""
    try:
        for member in members(path):
            leaf = posixpath.basename(member.name)
            if leaf.startswith(".") or "." not in leaf:
                continue  # hidden files of the system that packed them, and members that belong to no pair
            name = member.name.replace("\\", "/")
            where = f"{shard}:{member.name}"
            if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in name.split("/"):
                collector.skip(where, "the name leads out of the archive")
            elif member.why_not:
                collector.skip(where, member.why_not)
            else:
                yield member
    except Damaged as error:
        collector.skip(shard, f"damaged: {error}; what follows is not read")
    except OSError as error:
        collector.skip(shard, f"cannot be read: {error.strerror or error}")


def _up_to_point(name: str) -> str:
    """What the members of a sample share, as WebDataset has it: their name up to the first point."""
    folder, leaf = posixpath.split(name)
    return posixpath.normpath(posixpath.join(folder, leaf.partition(".")[0]))


def _key(name: str) -> tuple[str, str]:
    """What an image and its caption share, and their ending. In img.1.png the first point belongs to the name."""
    first, ending = _up_to_point(name), posixpath.basename(name).partition(".")[2].lower()
    if ending in (*IMAGES, *TEXTS):
        return first, ending
    stem, last = posixpath.splitext(name)
    return posixpath.normpath(stem), last[1:].lower()


def _add_group(path, shard, key, images, texts, config, collector, split, keys) -> None:
    where = f"{shard}:{key}"
    fields = _fields(texts.get("json"))
    captions, own = ([], "") if isinstance(fields, str) else _captions(texts, fields, config, keys)
    if not images:
        if texts:
            collector.skip(where, "a caption without an image")
        return
    for member in images:
        name = f"{shard}:{posixpath.normpath(member.name)}"
        if collector.holds(name):
            collector.skip(name, "the same name again in the same shard")
            continue
        if isinstance(fields, str):
            collector.skip(name, fields)
            continue
        if not captions or not member.size:
            collector.skip(name, "an empty image" if captions else "no caption")
            continue
        for caption in captions:
            collector.add(ImageInTar(path, member.offset, member.size, name), caption, own or split, name)


def _fields(content: bytes | None) -> dict[str, Any] | str:
    """What the JSON of a pair holds, or why it cannot be told: then its split is unknown, and an image of the test
    split must not be trained on for that."""
    if content is None:
        return {}
    if len(content) > MOST_TEXT:
        return "its JSON is too long"
    try:
        fields = json.loads(decode(content))
    except (ValueError, RecursionError):
        return "its JSON is damaged"
    return fields if isinstance(fields, dict) else {}


def _captions(
    texts: dict[str, bytes], fields: dict[str, Any], config: DataConfig, keys: dict[str, int]
) -> tuple[list[str], str]:
    """The captions of a pair and its split: from the text, a caption a line, or else from a key of the JSON."""
    own = next((fields[key] for key in _asked(config.split_column, SPLITS) if isinstance(fields.get(key), str)), "")
    if "txt" in texts and config.caption_column == AUTO:
        keys[".txt"] = 0
        lines = [line for line in decode(texts["txt"]).splitlines() if line.strip()]
        if lines:
            return lines, own
    for key in _asked(config.caption_column, CAPTIONS):
        captions = [text for text in captions_in(fields.get(key)) if text]
        if captions:
            keys[f"{key} of .json"] = 0
            return captions, own
    return [], own


def _asked(setting: str, usual: Sequence[str]) -> Sequence[str]:
    return usual if setting == AUTO else [setting] if setting else []

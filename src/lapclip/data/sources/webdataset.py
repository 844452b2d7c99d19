"""WebDataset shards: tar files whose neighboring members share a name, an image and its caption each."""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.config import AUTO, DataConfig
from lapclip.data.columns import CAPTION_NAMES, SPLIT_NAMES
from lapclip.data.find_images import ENDINGS
from lapclip.data.sources.files import decode
from lapclip.data.sources.json_files import captions_in
from lapclip.data.sources.registry import FileFormat, Files, Form, Specificity, register
from lapclip.data.table import ImageInTar, RowCollector

IMAGES = tuple(ending[1:] for ending in ENDINGS)
TEXTS = ("txt", "json")
MAX_TEXT_BYTES = 1_000_000  # of a text beside an image; what is longer is no caption


@dataclass
class Sample:
    """The images and texts of a shard that share a name."""

    key: str
    images: list[Member]
    texts: dict[str, bytes]
    """Contents by ending: "txt" or "json"."""


@register
class TarShards(FileFormat):
    """Tar files, each of the split that its path says."""

    label = "tar shards"
    endings = (".tar",)
    by_pattern = True
    unit = "shards"

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        shards = [name for name in names if name.lower().endswith(self.endings)]
        yield Form(Specificity.SHARDS, shards, format=self)

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        origins: dict[str, None] = {}
        for path, split in files.paths():
            shard = path.relative_to(files.root).as_posix()
            for sample in read_samples(path, shard, collector):
                origin = add_sample(sample, path, shard, split, config, collector)
                if origin:
                    origins[origin] = None
        return f"captions in {', '.join(origins) or 'nothing'}"


def read_samples(path: Path, shard: str, collector: RowCollector) -> Iterator[Sample]:
    """Yield the samples of a shard. Neighbors up to the first point of their name belong together."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        collector.skip(shard, f"cannot be read: {error.strerror or error}")
        return
    with file:
        usable = usable_members(path, shard, collector)
        for _, neighbors in itertools.groupby(usable, key=lambda member: first_stem(member.name)):
            samples: dict[str, Sample] = {}
            for member in neighbors:
                key, ending = split_name(member.name)
                if ending not in (*IMAGES, *TEXTS):
                    continue
                sample = samples.setdefault(key, Sample(key, [], {}))
                if ending in IMAGES:
                    sample.images.append(member)
                elif member.size <= MAX_TEXT_BYTES or ending == "json":
                    file.seek(member.offset)
                    sample.texts[ending] = file.read(min(member.size, MAX_TEXT_BYTES + 1))
            yield from samples.values()


def usable_members(path: Path, shard: str, collector: RowCollector) -> Iterator[Member]:
    """Yield the members that can be read. The others are named and left out; damage ends the shard."""
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


def first_stem(name: str) -> str:
    """Return a name up to its first point, which the members of a sample share in WebDataset."""
    folder, leaf = posixpath.split(name)
    return posixpath.normpath(posixpath.join(folder, leaf.partition(".")[0]))


def split_name(name: str) -> tuple[str, str]:
    """Return what an image and its caption share, and the ending. In img.1.png the first point belongs to the name."""
    ending = posixpath.basename(name).partition(".")[2].lower()
    if ending in (*IMAGES, *TEXTS):
        return first_stem(name), ending
    stem, last = posixpath.splitext(name)
    return posixpath.normpath(stem), last[1:].lower()


def add_sample(
    sample: Sample,
    path: Path,
    shard: str,
    split: str,
    config: DataConfig,
    collector: RowCollector,
) -> str:
    """Collect the pairs of a sample. Returns where its captions come from."""
    fields = parse_fields(sample.texts.get("json"))
    fault, captions, origin = "", [], ""
    if isinstance(fields, str):
        fault = fields
    else:
        captions, origin = find_captions(sample.texts, fields, config)
        splits = [fields.get(key) for key in candidates(config.split_column, SPLIT_NAMES)]
        split = next((value for value in splits if isinstance(value, str)), split)
    if not sample.images and sample.texts:
        collector.skip(f"{shard}:{sample.key}", "a caption without an image")
    for member in sample.images:
        name = f"{shard}:{posixpath.normpath(member.name)}"
        if collector.holds(name):
            collector.skip(name, "the same name again in the same shard")
        elif fault or not captions:
            collector.skip(name, fault or "no caption")
        elif not member.size:
            collector.skip(name, "an empty image")
        else:
            image = ImageInTar(path, member.offset, member.size, name)
            for caption in captions:
                collector.add(image, caption, split, name)
    return origin


def parse_fields(content: bytes | None) -> dict[str, Any] | str:
    """Return what the JSON of a sample holds, or why it cannot be read.

    A sample with damaged JSON is left out: it could belong to the test split.
    """
    if content is None:
        return {}
    if len(content) > MAX_TEXT_BYTES:
        return "its JSON is too long"
    try:
        fields = json.loads(decode(content))
    except (ValueError, RecursionError):
        return "its JSON is damaged"
    return fields if isinstance(fields, dict) else {}


def find_captions(
    texts: dict[str, bytes], fields: dict[str, Any], config: DataConfig
) -> tuple[list[str], str]:
    """Return the captions of a sample and their origin: the text, a caption a line, or else a key of the JSON."""
    if "txt" in texts and config.caption_column == AUTO:
        lines = [line for line in decode(texts["txt"]).splitlines() if line.strip()]
        if lines:
            return lines, ".txt"
    for key in candidates(config.caption_column, CAPTION_NAMES):
        captions = [text for text in captions_in(fields.get(key)) if text]
        if captions:
            return captions, f"{key} of .json"
    return [], ""


def candidates(setting: str, usual: Sequence[str]) -> Sequence[str]:
    """Return the keys that may hold a value: the one of the settings, or the usual ones."""
    if setting == AUTO:
        return usual
    return [setting] if setting else []


BLOCK = 512
MAX_EXTENSION_BYTES = 1 << 20  # of a long name or of pax fields
MAX_PADDING_BYTES = (
    1 << 16
)  # zeros at the end: programs fill up records of 20 blocks, some of them larger ones


class Damaged(Exception):
    """From some offset on the file is no tar; what came before can be used."""


@dataclass(frozen=True, slots=True)
class Member:
    """A plain file in a tar, or something else that is not read, with the reason."""

    name: str
    offset: int
    size: int
    why_not: str = ""


_OTHER = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
          b"S": "a sparse file"}  # fmt: skip


def members(path: Path) -> Iterator[Member]:
    """Yield the members of a tar in order, folders left out, from its headers alone: nothing is ever extracted.

    Unlike Python's own reader, whose parser of single headers it uses, it goes forward only: a damaged or hostile
    header ends the reading, with its offset. It knows ustar, pax, and GNU's long names. Raises Damaged if the file
    cannot be read on.
    """
    end = os.stat(path).st_size
    with open(path, "rb") as file:
        offset, long_name, long_size = 0, None, None
        while offset + BLOCK <= end:
            file.seek(offset)
            header = file.read(BLOCK)
            if not header.strip(b"\0"):
                # An end mark; but a shard with a hole, a filled-up download and two shards in one file have zeros too.
                if end - offset > MAX_PADDING_BYTES or file.read(MAX_PADDING_BYTES).strip(b"\0"):
                    raise Damaged(f"zeros at byte {offset:,}, and then not the end")
                return
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                raise Damaged(f"no header at byte {offset:,}") from None
            kind, size = info.type, info.size
            if size < 0:
                raise Damaged(f"no size at byte {offset:,}")
            body = offset + BLOCK
            if kind in b"LKxXg":
                if size > MAX_EXTENSION_BYTES or body + size > end:
                    raise Damaged(f"a header at byte {offset:,} that is too long")
                content = file.read(size)
                if kind == b"L":
                    long_name = content.split(b"\0")[0]
                elif kind in b"xX":
                    fields = _pax(content)
                    long_name = fields.get(b"path", long_name)
                    long_size = _decimal(fields.get(b"size"))
                offset = body + _padded(size)
                continue
            size = size if long_size is None else long_size
            name = info.name
            if long_name is not None:
                name = long_name.decode("utf-8", "surrogateescape")
            long_name = long_size = None
            if kind in _OTHER:
                yield Member(name, body, 0, _OTHER[kind])
                offset = body + (_padded(size) if kind == b"S" else 0)
                continue
            if kind != b"5":
                if body + size > end:
                    yield Member(name, body, size, "the file ends before it does")
                    return
                yield Member(name, body, size)
            offset = body + _padded(size)
        if offset < end or offset == 0:
            raise Damaged(f"the end is missing at byte {offset:,}")


def _padded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK


def _decimal(field: bytes | None) -> int | None:
    """Return a number in digits. None if there is none, or if it is longer than any real one."""
    if field is None or len(field) > 20 or not field.isdigit():
        return None
    return int(field)


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Lines of length, name and value: `21 path=some/name.jpg`."""
    fields: dict[bytes, bytes] = {}
    while content:
        length = _decimal(content.split(b" ", 1)[0])
        if not length or length > len(content):
            break
        name, _, value = content[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        fields[name] = value
        content = content[length:]
    return fields

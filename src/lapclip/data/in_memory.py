"""Data that a program has in memory, written down as files, so that a run finds it again when it is resumed.

Pairs, frames and data sets of other libraries are known by what they can do, not by their type: none of these libraries
is needed. What they hold becomes a folder with a captions.jsonl, as any other folder of data. Where all images are
named by their paths they stay where they are, unless no one folder holds them, as on two drives of Windows. All others
become files in that folder, with their own bytes where they have some, else as PNG, which loses nothing. The folder is
named after its content: the same data is kept once, and other data never takes its place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from lapclip.config import AUTO, DataConfig
from lapclip.data.any_image import as_image, is_array
from lapclip.data.decode import as_file, decoding_threads
from lapclip.data.find_images import ImageFinder, is_image
from lapclip.data.splits import split_named
from lapclip.data.table import some
from lapclip.errors import DataError, first_line, nearest
from lapclip.paths import (
    digest_of_bytes,
    partial_path,
    read_bytes,
    remove,
    replace,
    sweep,
    write_atomic,
)
from lapclip.progress import DataProgress
from lapclip.text import printable

TABLE, IMAGES, ABSENT = "captions.jsonl", "images", "missing"
"""The table; the folder of images, and one that is not there, in which images lie that are not there either."""
IMAGE, CAPTION, SPLIT = "image", "caption", "split"
"""The columns of pairs, and that of the splits which a dictionary of data names."""
SAMPLE = 20
"""Rows from which the column of the images is told."""
CHUNK = 64
"""Images that are in memory at once while they are written."""
ENDINGS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}
"""How the files of a format begin, and how their names end."""


@dataclass(frozen=True)
class Records:
    """Rows by number, each with values by column, whatever they come from."""

    count: int
    row: Callable[[int], Mapping[str, Any]]
    pairs: bool = False
    """Whether they were pairs, so that the columns are ours."""
    split: str = ""


def write_data(
    data: Any,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    progress: DataProgress | None = None,
) -> dict[str, Any]:
    """Write data into a folder of its own below `folder`. Gives back the settings by which a run reads it, with all
    others that were given.

    `settings` are the user's own by their whole names: `data.picture_column` names the images' column, `data.pictures`
    the folder that their paths are relative to.
    """
    asked = dict(settings or {})
    base = str(asked.pop("data.pictures", None) or "")  # the table has paths of its own
    parts = _parts(data)
    if not sum(part.count for part in parts):
        raise DataError("The data has no rows.", hint="pairs of an image and a caption")
    column = _image_column(parts, asked.get("data.picture_column", AUTO))
    most_absent = asked.get("data.broken_share", DataConfig().broken_share)
    folder = Path(os.path.abspath(folder))
    partial = partial_path(folder / "new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        (partial / IMAGES).mkdir(parents=True)
        records, pictures = _write(parts, column, partial / IMAGES, base, most_absent, progress)
        table = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (partial / TABLE).write_text(table, encoding="utf-8", errors="replace", newline="\n")
        digest = hashlib.sha256(f"{pictures}\n{table}".encode("utf-8", "replace")).hexdigest()[:16]
        _settle(partial, folder / digest)
    except OSError as error:
        raise DataError(
            f"The data cannot be written to {folder}: {error.strerror or error}.",
            hint="free some disk space, or give all images as paths, which are not copied",
        ) from error
    finally:
        remove(partial)
    found = asked | {"data.source": str(folder / digest), "data.picture_column": column}
    found |= {"data.pictures": pictures} if pictures else {}
    return found | ({"data.caption_column": CAPTION} if all(part.pairs for part in parts) else {})


def _settle(partial: Path, path: Path) -> None:
    """Give a whole folder its name. Where the same data is there, perhaps since a moment ago by another process, only
    what that has lost is put back: a computer that crashes may leave files that are empty."""
    if not path.exists():
        try:
            replace(partial, path)
            return
        except OSError:
            if not path.exists():
                raise
    for file in sorted(file for file in partial.rglob("*") if file.is_file()):
        there = path / file.relative_to(partial)
        if not there.is_file() or there.stat().st_size != file.stat().st_size:
            there.parent.mkdir(exist_ok=True)
            replace(file, there)


def _parts(data: Any) -> list[Records]:
    """The rows of what was given; a dictionary of splits has several parts."""
    if isinstance(data, Mapping) and data and all(split_named(str(name)) for name in data):
        return [
            Records(part.count, part.row, part.pairs, str(name))
            for name, each in data.items()
            for part in [_rows(each)]
        ]
    return [_rows(data)]


def _rows(data: Any) -> Records:
    if isinstance(data, Mapping):
        for name, values in data.items():
            if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
                raise DataError(
                    f"The column {name} is {values!r:.60}, no list of values.",
                    hint="a value for each row",
                )
        return _columns({str(name): list(values) for name, values in data.items()})
    if isinstance(getattr(data, "column_names", None), list) and hasattr(
        data, "features"
    ):  # a Dataset of Hugging Face
        data = _undecoded(data)
        return Records(_length(data), lambda at: _item(data, at))
    if isinstance(getattr(data, "column_names", None), list) and hasattr(
        data, "to_pylist"
    ):  # a table of Arrow
        return _columns({name: data[name].to_pylist() for name in data.column_names})
    if hasattr(data, "columns") and hasattr(data, "shape"):  # a frame of pandas or polars
        names = [str(name) for name in data.columns]
        if twice := [name for at, name in enumerate(names) if name in names[:at]]:
            raise DataError(
                f"The data has two columns called {twice[0]}.",
                hint="other names, or one of them alone",
            )
        return _columns({str(name): list(data[name]) for name in data.columns})
    if not hasattr(data, "__getitem__"):
        told = type(data).__name__
        if isinstance(data, Iterator) or hasattr(data, "__iter__"):
            raise DataError(
                f"A {told} cannot be asked for its rows by number.",
                hint="list(DATA), or its data set",
            )
        raise DataError(
            f"A {told} is no data.", hint="a path, or a list of pairs of an image and a caption"
        )
    return Records(_length(data), lambda at: _pair(_item(data, at), at), pairs=_is_of_pairs(data))


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise DataError(
            f"A {type(data).__name__} does not say how many rows it has.",
            hint="data that is not streamed, or list(DATA)",
        ) from None
    except Exception as error:  # it may be code of the user's own, as `_item`
        why = f"{type(error).__name__}, {first_line(error)}"
        raise DataError(
            f"A {type(data).__name__} does not say how many rows it has: {why}."
        ) from error


def _columns(columns: Mapping[str, list[Any]]) -> Records:
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise DataError(
            f"Columns have to be equally long, not {' and '.join(f'{size:,}' for size in sorted(lengths))}.",
            hint="a value for each row; splits are called train, val and test",
        )
    return Records(
        max(lengths, default=0), lambda at: {name: values[at] for name, values in columns.items()}
    )


def _undecoded(data: Any) -> Any:
    """The same data set with its images as the files they are, unless the user transforms them."""
    if (data.format or {}).get("type") is not None:
        return data
    for name, feature in (data.features or {}).items():
        if type(feature).__name__ == "Image" and getattr(feature, "decode", False):
            data = data.cast_column(name, type(feature)(decode=False))
    return data


def _item(data: Any, at: int) -> Any:
    """What data has under a number. It may be code of the user's own, which can fail in any way."""
    try:
        return data[at]
    except Exception as error:
        raise DataError(
            f"Item {at} of the data cannot be read: {type(error).__name__}, {first_line(error)}."
        ) from error


def _is_of_pairs(data: Any) -> bool:
    return not len(data) or not isinstance(_item(data, 0), Mapping)


def _pair(item: Any, at: int) -> Mapping[str, Any]:
    """An item of a list or of a data set of torch."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, (tuple, list)) and len(item) == 2:
        image, captions = item[0], _plain(item[1])
        if not _texts(captions):
            raise DataError(
                f"Item {at} has {item[1]!r:.60} in place of a caption.",
                hint="a text, or a list of texts; names of classes as f'a photo of a {NAME}'",
            )
        return {IMAGE: image, CAPTION: captions}
    raise DataError(
        f"Item {at} is a {type(item).__name__}.",
        hint="a pair (image, caption), or a dictionary of both",
    )


def _image_column(parts: Sequence[Records], asked: str) -> str:
    """The column with the images: the one that was asked for, else told by what it holds."""
    if all(part.pairs for part in parts):
        return IMAGE
    sample = [part.row(at) for part in parts for at in range(min(part.count, SAMPLE))]
    names = list(dict.fromkeys(name for row in sample for name in row))
    if asked != AUTO:
        if asked not in names:
            raise DataError(
                f"The data has no column {asked}. {nearest(asked, names)}",
                hint="data.picture_column",
            )
        return asked
    for fits in (_holds_image, _names_image):
        for name in names:
            values = [row[name] for row in sample if not _is_missing(row.get(name))]
            if values and all(map(fits, values)):
                if not any(
                    _texts(_plain(row.get(other)))
                    for row in sample
                    for other in names
                    if other != name
                ):
                    raise DataError(
                        f"None of the columns {', '.join(names)} holds captions.",
                        hint="a column of texts; for classes: f'a photo of a {NAME}'",
                    )
                return name
    raise DataError(
        f"None of the columns {', '.join(names) or '(there are none)'} holds images or their paths.",
        hint='settings={"data.picture_column": NAME}',
    )


def _holds_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "bytes" in value or "path" in value
    array = is_array(value) and str(value.dtype) != "object" and len(value.shape) in (2, 3)
    return array or isinstance(value, (bytes, bytearray, Image.Image))


def _names_image(value: Any) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and is_image(value))


def _write(
    parts: Sequence[Records],
    column: str,
    images: Path,
    base: str,
    most_absent: float,
    progress: DataProgress | None,
) -> tuple[list[dict[str, Any]], str]:
    """Write the images that are in memory. Gives back the rows of the table, and the folder that their names are
    relative to; empty where that is the folder itself. Refuses data of which more than a share of the images is
    absent."""
    total = sum(part.count for part in parts)
    base = os.path.expanduser(base)
    records: list[dict[str, Any]] = []
    paths: dict[int, str] = {}
    for part in parts:
        for first in range(0, part.count, CHUNK):
            rows = [(at, part.row(at)) for at in range(first, min(first + CHUNK, part.count))]
            stored = decoding_threads().map(
                lambda row: _stored(row[1].get(column), row[0], images), rows
            )
            for (_, row), image in zip(rows, stored, strict=True):
                others = {name: _plain(value) for name, value in row.items() if name != column}
                record = {name: value for name, value in others.items() if value is not None}
                record[column] = image
                if part.split:
                    record[SPLIT] = part.split
                if isinstance(image, Path):
                    paths[len(records)] = os.path.realpath(
                        os.path.join(base, os.path.expanduser(image))
                    )
                records.append(record)
            if progress:
                progress(len(records), total, "writing down")
    pictures = _common(list(paths.values())) if len(paths) == len(records) else ""
    for at, path in paths.items():
        records[at][column] = (
            Path(os.path.relpath(path, pictures)).as_posix() if pictures else _copied(path, images)
        )
    finder = ImageFinder(Path(pictures)) if pictures else None
    absent = [
        at for at, record in enumerate(records) if _is_absent(record[column], paths.get(at), finder)
    ]
    if len(absent) > most_absent * total:
        where = [
            f"item {_number(parts, at)}" + (f" ({printable(paths[at])})" if at in paths else "")
            for at in absent
        ]
        share = math.ceil(100 * len(absent) / total) / 100
        others = (
            f', or settings={{"data.broken_share": {share:g}}} to go on with the others'
            if share < 1
            else ""
        )
        raise DataError(
            f"{len(absent):,} of {total:,} images cannot be found or read: {some(where)}.",
            hint=f"paths that lead there from this folder, or whole ones{others}",
        )
    return records, pictures


def _is_absent(name: str, path: str | None, finder: ImageFinder | None) -> bool:
    """Whether the table names an image that will not be found. One may be found by a name that is only similar."""
    if finder is None or path is None:
        return name.startswith(f"{ABSENT}/")
    return not os.path.exists(path) and isinstance(finder.find(name), str)


def _number(parts: Sequence[Records], at: int) -> str:
    """A row as its user counts it: from 0 in its own part of the data."""
    for part in parts:
        if at < part.count:
            return f"{at} of {part.split}" if part.split else str(at)
        at -= part.count
    raise IndexError(at)


def _common(paths: list[str]) -> str:
    """The folder that all images lie in; empty where there is none, as on two drives of Windows."""
    try:
        return os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:
        return ""


def _copied(path: str, images: Path) -> str:
    try:
        content = read_bytes(path, own=True)
    except OSError:
        return f"{ABSENT}/{Path(path).name}"  # where the table is read it is counted and named
    return _file(content, images, Path(path).suffix[1:])


def _stored(value: Any, at: int, images: Path) -> Path | str:
    """The path of an image that is a file, or the name under which it was written."""
    if isinstance(value, Mapping):  # as Hugging Face has images that are not decoded
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, os.PathLike)):
        value = os.fsdecode(value)  # a path may be one of bytes
        return Path(value) if "\0" not in value else f"{ABSENT}/{at}"
    if _is_missing(value):
        return f"{ABSENT}/{at}"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _file(bytes(value), images)
    unread = isinstance(value, Image.Image) and getattr(value, "tile", None) and not value.tell()
    if unread and (name := getattr(value, "filename", "")):
        return Path(
            os.path.abspath(name)
        )  # opened, at its first image, and not read yet: it is what the file is
    try:
        opened = as_image(value)
        assert isinstance(opened, Image.Image)
        return _file(as_file(opened, format="PNG", compress_level=1), images, "png")
    except DataError as error:
        raise DataError(
            f"The image of item {at} cannot be used. {error.message}", hint=error.hint
        ) from None


def _file(content: bytes, images: Path, ending: str = "") -> str:
    """Write a file that is named after its bytes, unless it is there."""
    ending = ending or next(
        (name for begin, name in ENDINGS.items() if content.startswith(begin)), "image"
    )
    path = images / f"{digest_of_bytes(content)[:32]}.{ending}"
    if not path.exists():
        write_atomic(path, content)
    return f"{IMAGES}/{path.name}"


def _texts(value: Any) -> bool:
    """Whether a value is a caption, or a list of them."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, (str, dict)) for each in value)
    return isinstance(value, str)


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or type(value).__name__ == "NAType"
        or (isinstance(value, float) and value != value)
    )


def _plain(value: Any) -> str | int | list[Any] | None:
    """A value of another column as the table holds it; None for what is no caption, no name and no split."""
    if is_array(value) and len(value.shape) <= 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return value if isinstance(value, list) and _texts(value) else None

"""Write data that a program has in memory to a folder, so that a resumed run finds it again.

Pairs, frames and data sets of other libraries are recognized by their methods, so none of these libraries is needed.
They become a folder with a captions.jsonl. If all images are named by paths below one folder, they stay where they are.
All others become files of the new folder, with their own bytes if they have some, else as PNG, which loses nothing. The
folder is named after its content: the same data is stored once, and other data never takes its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lapclip.config import AUTO
from lapclip.data.any_image import BYTES, as_image, is_array, is_one_image
from lapclip.data.decode import as_file, decoding_threads
from lapclip.data.find_images import is_image
from lapclip.data.splits import split_named
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

TABLE, IMAGES = "captions.jsonl", "images"
MISSING = "missing"  # a folder that is not there, for images that are not there either
IMAGE, CAPTION, SPLIT = "image", "caption", "split"
SAMPLE_ROWS = 20  # rows by which the column of images is recognized
CHUNK = 64  # images that are in memory at once while they are written
ENDINGS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}


@dataclass(frozen=True)
class Records:
    """Rows by number. Each maps names of columns to values."""

    count: int
    row: Callable[[int], Mapping[str, Any]]
    are_pairs: bool = False
    """Whether the rows were pairs, so that the names of the columns are ours."""
    split: str = ""


def write_data(
    data: Any,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    progress: DataProgress | None = None,
) -> dict[str, Any]:
    """Write data to a folder of its own below `folder`. Returns the settings by which a run reads it.

    `settings` are the user's own by their whole names. `data.picture_column` names the column of images, and
    `data.pictures` the folder that their paths are relative to.
    """
    written = dict(settings or {})
    base = os.path.expanduser(str(written.pop("data.pictures", None) or ""))
    parts = _parts(data)
    if not sum(part.count for part in parts):
        raise DataError("The data has no rows.", hint="pairs of an image and a caption")
    column = _image_column(parts, written.get("data.picture_column", AUTO))
    folder = Path(os.path.abspath(folder))
    unfinished = partial_path(folder / "new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        (unfinished / IMAGES).mkdir(parents=True)
        records, pictures = _write(parts, column, unfinished / IMAGES, base, progress)
        table = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (unfinished / TABLE).write_text(table, encoding="utf-8", errors="replace", newline="\n")
        digest = hashlib.sha256(f"{pictures}\n{table}".encode("utf-8", "replace")).hexdigest()[:16]
        _move_into_place(unfinished, folder / digest)
    except OSError as error:
        raise DataError(
            f"The data cannot be written to {folder}: {error.strerror or error}.",
            hint="free some disk space, or give all images as paths, which are not copied",
        ) from error
    finally:
        remove(unfinished)
    written |= {"data.source": str(folder / digest), "data.picture_column": column}
    if pictures:
        written["data.pictures"] = pictures
    if all(part.are_pairs for part in parts):
        written["data.caption_column"] = CAPTION
    return written


def _move_into_place(unfinished: Path, path: Path) -> None:
    """Rename a complete folder. If the same data is there already, replace only files that were lost or cut off."""
    try:
        if not path.exists():
            replace(unfinished, path)
            return
    except OSError:
        if not path.exists():  # else another process was faster
            raise
    for file in sorted(file for file in unfinished.rglob("*") if file.is_file()):
        target = path / file.relative_to(unfinished)
        if not target.is_file() or target.stat().st_size != file.stat().st_size:
            target.parent.mkdir(exist_ok=True)
            replace(file, target)


# -- rows --------------------------------------------------------------------------------------------------------------


def _parts(data: Any) -> list[Records]:
    """Return the rows of each split of a dictionary of splits, or all rows as one part."""
    if isinstance(data, Mapping) and data and all(split_named(str(name)) for name in data):
        return [replace_field(_rows(part), split=str(name)) for name, part in data.items()]
    return [_rows(data)]


def _rows(data: Any) -> Records:
    """Return the rows of any kind of data."""
    if isinstance(data, Mapping):
        for name, values in data.items():
            if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
                raise DataError(
                    f"The column {name} is {values!r:.60}, no list of values.",
                    hint="a value for each row",
                )
        return _columns({str(name): list(values) for name, values in data.items()})
    names = getattr(data, "column_names", None)
    if isinstance(names, list) and hasattr(data, "features"):  # a Dataset of Hugging Face
        data = _undecoded(data)
        return Records(_length(data), partial(_item, data))
    if isinstance(names, list) and hasattr(data, "to_pylist"):  # a table of Arrow
        return _columns({name: data[name].to_pylist() for name in names})
    if hasattr(data, "columns") and hasattr(data, "shape"):  # a frame of pandas or polars
        return _columns({str(name): list(data[name]) for name in data.columns})
    if not hasattr(data, "__getitem__"):
        raise DataError(
            f"A {type(data).__name__} is no data.",
            hint="a path, list(DATA), or a list of pairs of an image and a caption",
        )
    count = _length(data)
    are_pairs = count == 0 or not isinstance(_item(data, 0), Mapping)
    return Records(count, lambda index: _pair(_item(data, index), index), are_pairs)


def _length(data: Any) -> int:
    try:
        return len(data)
    except Exception as error:  # it may be the user's own code
        raise DataError(
            f"A {type(data).__name__} does not say how many rows it has: "
            f"{type(error).__name__}, {first_line(error)}.",
            hint="data that is not streamed, or list(DATA)",
        ) from error


def _columns(columns: Mapping[str, list[Any]]) -> Records:
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise DataError(
            f"Columns have to be equally long, not {' and '.join(map(str, sorted(lengths)))}.",
            hint="a value for each row; splits are called train, val and test",
        )
    return Records(
        max(lengths, default=0),
        lambda index: {name: values[index] for name, values in columns.items()},
    )


def _undecoded(data: Any) -> Any:
    """Return a data set of Hugging Face whose images are the bytes of their files, unless the user transforms them."""
    if (data.format or {}).get("type") is not None:
        return data
    for name, feature in (data.features or {}).items():
        if type(feature).__name__ == "Image" and getattr(feature, "decode", False):
            data = data.cast_column(name, type(feature)(decode=False))
    return data


def _item(data: Any, index: int) -> Any:
    try:
        return data[index]
    except Exception as error:  # it may be the user's own code
        raise DataError(
            f"Item {index} of the data cannot be read: {type(error).__name__}, {first_line(error)}."
        ) from error


def _pair(item: Any, index: int) -> Mapping[str, Any]:
    """Return an item of a list, or of a data set of torch, as a row."""
    if isinstance(item, Mapping):
        return item
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(
            f"Item {index} is a {type(item).__name__}.",
            hint="a pair (image, caption), or a dictionary of both",
        )
    image, captions = item[0], _plain(item[1])
    if not _is_caption(captions):
        raise DataError(
            f"Item {index} has {item[1]!r:.60} in place of a caption.",
            hint="a text, or a list of texts; names of classes as f'a photo of a {NAME}'",
        )
    return {IMAGE: image, CAPTION: captions}


def _image_column(parts: Sequence[Records], requested: str) -> str:
    """Return the requested column of images, or else the first one that holds images or paths of images."""
    if all(part.are_pairs for part in parts):
        return IMAGE
    sample = [part.row(index) for part in parts for index in range(min(part.count, SAMPLE_ROWS))]
    columns: dict[str, list[Any]] = {}
    for row in sample:
        for name, value in row.items():
            values = columns.setdefault(name, [])
            if not _is_missing(value):
                values.append(value)
    if requested != AUTO:
        if requested not in columns:
            raise DataError(
                f"The data has no column {requested}. {nearest(requested, columns)}",
                hint="data.picture_column",
            )
        return requested
    for is_match in (_holds_image, _names_image):
        for name, values in columns.items():
            if values and all(map(is_match, values)):
                _check_captions(columns, name)
                return name
    raise DataError(
        f"None of the columns {', '.join(columns) or '(there are none)'} holds images or their paths.",
        hint='settings={"data.picture_column": NAME}',
    )


def _check_captions(columns: Mapping[str, list[Any]], image_column: str) -> None:
    """Raise DataError if no other column than that of the images holds captions."""
    for name, values in columns.items():
        if name != image_column and any(_is_caption(_plain(value)) for value in values):
            return
    raise DataError(
        f"None of the columns {', '.join(columns)} holds captions.",
        hint="a column of texts; for classes: f'a photo of a {NAME}'",
    )


# -- values ------------------------------------------------------------------------------------------------------------


def _holds_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "bytes" in value or "path" in value
    return is_one_image(value) and not isinstance(value, (str, os.PathLike))


def _names_image(value: Any) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and is_image(value))


def _is_caption(value: Any) -> bool:
    """Return whether a value is a caption or a list of captions."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, (str, dict)) for item in value)
    return isinstance(value, str)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or what pandas has for it."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ == "NAType"


def _plain(value: Any) -> str | int | list[Any] | None:
    """Return a value as the table holds it. None if it is no caption, name or split."""
    if is_array(value) and len(value.shape) <= 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return value if isinstance(value, list) and _is_caption(value) else None


# -- files -------------------------------------------------------------------------------------------------------------


def _write(
    parts: Sequence[Records], column: str, images: Path, base: str, progress: DataProgress | None
) -> tuple[list[dict[str, Any]], str]:
    """Write the images that are in memory.

    Returns the rows of the table, and the folder that their names are relative to, or "" for the folder of the table.
    """
    total = sum(part.count for part in parts)
    records: list[dict[str, Any]] = []
    paths: dict[int, str] = {}  # of images that are files already, by row
    for part in parts:
        for first in range(0, part.count, CHUNK):
            rows = [part.row(index) for index in range(first, min(first + CHUNK, part.count))]
            values = [row.get(column) for row in rows]
            stored = decoding_threads().map(
                lambda value, index: _store(value, index, images), values, range(first, part.count)
            )
            for row, image in zip(rows, stored, strict=True):
                record: dict[str, Any] = {}
                for name, value in row.items():
                    plain = _plain(value)
                    if name != column and plain is not None:
                        record[name] = plain
                if part.split:
                    record[SPLIT] = part.split
                if isinstance(image, Path):
                    path = os.path.join(base, os.path.expanduser(image))
                    paths[len(records)] = os.path.realpath(path)
                record[column] = image
                records.append(record)
            if progress:
                progress(len(records), total, "writing down")
    pictures = _common_folder(list(paths.values())) if len(paths) == len(records) else ""
    for index, path in paths.items():
        if pictures:
            records[index][column] = Path(os.path.relpath(path, pictures)).as_posix()
        else:
            records[index][column] = _copy(path, images)
    return records, pictures


def _common_folder(paths: list[str]) -> str:
    """Return the folder that all files lie in. Empty if there is none, as on two drives of Windows."""
    try:
        return os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:
        return ""


def _copy(path: str, images: Path) -> str:
    """Copy an image and return its name in the table, where a file that is not there is counted and named."""
    try:
        content = read_bytes(path, own=True)
    except OSError:
        return f"{MISSING}/{Path(path).name}"
    return _write_file(content, images, Path(path).suffix[1:])


def _store(value: Any, index: int, images: Path) -> Path | str:
    """Return the path of an image that is a file, or write it and return its name in the table."""
    if isinstance(value, Mapping):  # an image of Hugging Face that is not decoded
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, os.PathLike)):
        path = os.fsdecode(value)
        return Path(path) if "\0" not in path else f"{MISSING}/{index}"
    if _is_missing(value):
        return f"{MISSING}/{index}"
    if isinstance(value, BYTES):
        return _write_file(bytes(value), images)
    if isinstance(value, Image.Image) and getattr(value, "tile", None) and not value.tell():
        name = getattr(value, "filename", "")
        if name:  # opened and not read yet, so it is still what its file is
            return Path(os.path.abspath(name))
    try:
        opened = as_image(value)
        assert isinstance(opened, Image.Image)
        content = as_file(opened, format="PNG", compress_level=1)
    except DataError as error:
        raise DataError(
            f"The image of item {index} cannot be used. {error.message}", hint=error.hint
        ) from None
    return _write_file(content, images, "png")


def _write_file(content: bytes, images: Path, ending: str = "") -> str:
    """Write a file that is named after its bytes, unless it is there. Returns its name in the table."""
    if not ending:
        endings = [name for start, name in ENDINGS.items() if content.startswith(start)]
        ending = endings[0] if endings else "image"
    path = images / f"{digest_of_bytes(content)[:32]}.{ending}"
    if not path.exists():
        write_atomic(path, content)
    return f"{IMAGES}/{path.name}"

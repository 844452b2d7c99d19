"""Parquet files with the bytes of images in a column, as Hugging Face stores data sets. Needs the extra `parquet`."""

from __future__ import annotations

import posixpath
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lapclip.config import AUTO, DataConfig
from lapclip.data.columns import (
    SAMPLE_ROWS,
    choose_caption_columns,
    choose_split_column,
    split_into_columns,
)
from lapclip.data.sources.json_files import add_captions, add_records, flat
from lapclip.data.sources.registry import FileFormat, Files, Form, Specificity, register
from lapclip.data.table import RowCollector, UsedColumns, file_stamp
from lapclip.errors import DataError, LapclipError, first_line
from lapclip.paths import check_size
from lapclip.suggest import install

CACHED_GROUPS, CACHED_BYTES = 4, 400_000_000
"""Row groups in memory at once: images are read in about the order of the file, by a few threads. Large ones are fewer,
and one that is larger still is not read."""
BATCH = 500
"""Rows of captions at once: a few bytes can stand for the same long text in every row."""


@register
class ParquetFiles(FileFormat):
    """Parquet files, each of the split that its path says; metadata.parquet is a table like others."""

    label = "parquet files"
    endings = (".parquet", ".pq")
    by_pattern = True

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        metadata = [name for name in names if posixpath.basename(name) == "metadata.parquet"]
        others = [
            name for name in names if name.lower().endswith(self.endings) and name not in metadata
        ]
        yield Form(Specificity.METADATA, metadata)
        yield Form(Specificity.PARQUET, others, format=self)

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        for path, split in files.paths():
            try:
                _read_file(path, files.root, config, collector, split)
            except LapclipError:
                raise
            except Exception as error:  # whatever pyarrow stumbles on
                if len(files.names) == 1:
                    raise DataError(
                        f"{path.name} cannot be read as parquet: {first_line(error)}."
                    ) from None
                collector.skip(path.name, f"cannot be read: {first_line(error)}")
        return "Parquet"


@dataclass(frozen=True, slots=True)
class ImageInCell:
    """An image in a cell of a parquet file."""

    path: Path
    column: str
    group: int
    row: int
    name: str

    def stamp(self) -> str:
        return f"{file_stamp(self.path)} {self.column} {self.group} {self.row}"

    def read(self) -> bytes:
        try:
            value = _group(self.path, self.group, self.column)[self.row].as_py()
        except (MemoryError, OSError):
            raise
        except Exception as error:  # whatever pyarrow stumbles on
            raise OSError(f"{self.name}: {first_line(error)}") from error
        value = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(value, bytes) or not value:
            raise OSError(f"{self.name} has no bytes")
        check_size(len(value))
        return value


def _read_file(
    path: Path, root: Path, config: DataConfig, collector: RowCollector, split: str
) -> None:
    with _opened(path) as file:
        schema = file.schema_arrow
        image = _image_column(schema, config)
        if image is None:
            add_records(
                path, root, config, collector, lambda: _records(path, file, schema.names), split
            )
            return
        used = _choose_columns(path, file, image, config)
        wanted = list(used.captions)
        if used.split is not None:
            wanted.append(used.split)
        images_before, number = len(collector), 0
        for group in range(file.num_row_groups):
            batches = file.iter_batches(BATCH, row_groups=[group], columns=wanted)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for index, row in enumerate(rows):
                number += 1
                name = f"{path.relative_to(root).as_posix()}:{number}"
                cell = ImageInCell(path, image, group, index, name)
                row_split = row.get(used.split)
                if not isinstance(row_split, str):
                    row_split = split
                for key in used.captions:
                    add_captions(
                        collector, cell, row.get(key), row_split, name, f"{key} is no text"
                    )
        collector.columns[used] += len(collector) - images_before


def _choose_columns(path: Path, file: Any, image: str, config: DataConfig) -> UsedColumns:
    """Choose the columns of captions and splits of a file that holds the bytes of its images."""
    schema = file.schema_arrow
    names = [name for name in schema.names if not _holds_bytes(schema.field(name).type)]
    first = next(file.iter_batches(SAMPLE_ROWS, columns=names), None)
    sample = first.to_pylist() if first else []
    rows = [[flat(row.get(name)) for name in names] for row in sample]
    columns = split_into_columns(names, rows)
    split = choose_split_column(columns, None, config, path.name)
    captions = choose_caption_columns(columns, [split], config, path.name)
    caption_names = tuple(column.name for column in captions)
    split_name = None if split is None else split.name
    return UsedColumns(image, caption_names, split_name, contents="images")


def _records(path: Path, file: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a file that names its images instead of holding them."""
    number = 0
    for batch in file.iter_batches(BATCH, columns=names):
        for row in batch.to_pylist():
            number += 1
            yield f"{path.name} row {number}", row


def _image_column(schema: Any, config: DataConfig) -> str | None:
    held = [name for name in schema.names if _holds_bytes(schema.field(name).type)]
    if config.picture_column != AUTO:
        return config.picture_column if config.picture_column in held else None
    return next((name for name in ("image", "picture", "jpg", "img", *held) if name in held), None)


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _opened(path: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{path.name} is a parquet file, and reading those needs pyarrow.",
            hint=install("parquet"),
        ) from None
    return ParquetFile(path)


_cached_groups: OrderedDict[tuple[Path, str, int, str], Future[Any]] = OrderedDict()
_lock = threading.Lock()


def _group(path: Path, group: int, column: str) -> Any:
    """The images of a row group, from memory where it was read just now. Threads that want the same one wait for the
    first of them, and a file that has changed is read again."""
    key = (path, file_stamp(path), group, column)
    with _lock:
        waiting = _cached_groups.get(key)
        found = waiting or Future()
        _cached_groups[key] = found
        _cached_groups.move_to_end(key)
        while len(_cached_groups) > CACHED_GROUPS or (
            len(_cached_groups) > 1 and _cached_bytes() > CACHED_BYTES
        ):
            _cached_groups.popitem(last=False)
    if waiting is None:
        try:
            found.set_result(_read_group(path, group, column))
        except BaseException as error:
            with _lock:
                _cached_groups.pop(key, None)
            found.set_exception(error)
    return found.result()


def _cached_bytes() -> int:
    done = [found for found in _cached_groups.values() if found.done() and not found.exception()]
    return sum(found.result().nbytes for found in done)


def _read_group(path: Path, group: int, column: str) -> Any:
    with _opened(path) as file:
        kind = file.schema_arrow.field(column).type
        leaf = f"{column}.bytes" if hasattr(kind, "num_fields") and kind.num_fields else column
        chunks = file.metadata.row_group(group)
        parts = [chunks.column(at) for at in range(chunks.num_columns)]
        check_size(
            sum(part.total_uncompressed_size for part in parts if part.path_in_schema == leaf),
            CACHED_BYTES,
        )
        return file.read_row_group(group, columns=[leaf]).column(0)

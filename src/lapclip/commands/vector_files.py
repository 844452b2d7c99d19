"""Files of vectors for other programs: parquet, npz and npy, each written piece by piece and whole or not at all.

Each tells which model made it, by its fingerprint, and what else is known of it (`about`); by that a file is also known
as one of ours, which may be replaced.

Shapes: N images, M captions, D the embedding.
"""

from __future__ import annotations

import glob
import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np

from lapclip.data.table import Row
from lapclip.errors import DataError
from lapclip.paths import parse_json, sweep, write_atomic
from lapclip.text import size

ABOUT, FINGERPRINT = "lapclip", "fingerprint"
"""Under which names a file tells what is known of it, as JSON, and which model made it."""
PIECE = 4096
"""Images at once, with their captions: what is in memory while a file is written."""
LARGEST_TEXTS = 2_000_000_000
"""Bytes of names or captions in an npz: numpy gives each as much room as the longest has, four bytes a letter."""


class Piece(NamedTuple):
    """Some images that have vectors, one after the other."""

    rows: Sequence[Row]
    image_ND: np.ndarray
    text_MD: np.ndarray
    """Of their captions, one image's after the other's; none where captions are not embedded."""


@dataclass(frozen=True)
class Embedded:
    """All that a file is to hold. Vectors are memory-mapped; rows are asked for as they are needed."""

    about: dict[str, Any]
    rows: Sequence[Row]
    kept: np.ndarray
    """Which rows have a vector, in order."""
    image_ND: np.ndarray
    text_MD: np.ndarray

    @property
    def has_texts(self) -> bool:
        return bool(len(self.text_MD))

    def pieces(self) -> Iterator[Piece]:
        first = 0
        for at in range(0, len(self.kept), PIECE):
            rows = [self.rows[row] for row in self.kept[at : at + PIECE].tolist()]
            last = first + (sum(len(row.captions) for row in rows) if self.has_texts else 0)
            yield Piece(rows, self.image_ND[at : at + PIECE], self.text_MD[first:last])
            first = last


class VectorFile(ABC):
    """One form of such a file."""

    ending: ClassVar[str]
    embeds_captions: ClassVar[bool] = True
    """Whether it has room for the vectors of captions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths = [path]
        """All the files that belong to it."""

    def check_packages(self) -> None:  # noqa: B027 (most forms need none)
        """Raise where a package is missing."""

    def check_rows(self, rows: Sequence[Row]) -> None:  # noqa: B027 (most forms take all)
        """Raise where it cannot hold these."""

    def check_free(self) -> dict[str, Any] | None:
        """What is known of the file that is there, or None where there is none. One that is not ours is refused."""
        there = [path for path in self.paths if path.exists() or path.is_symlink()]
        try:
            about = self.read_about() if there else None
        except Exception:  # whatever readers stumble on: it is something else
            about = None
        if there and not isinstance(about, dict):
            raise DataError(
                f"{there[0]} is there and was not written by lapclip embed, so it is left alone.",
                hint=f"--out with another name, such as {self.path.with_stem(f'{self.path.stem}-vectors')}",
            )
        return about if len(there) == len(self.paths) else None

    def replace(self, found: Embedded) -> None:
        """Write all of it, and only then let it take the place of what was there."""
        for path in self.paths:
            sweep(path.parent, f".{glob.escape(path.name)}.*")
        self.write(found)

    @abstractmethod
    def read_about(self) -> Any:
        """What the file that is there says of itself. Raises whatever its reader does where it is something else."""

    @abstractmethod
    def write(self, found: Embedded) -> None: ...


class ParquetFile(VectorFile):
    """A row an image, with a list of its captions and one of their vectors."""

    ending = ".parquet"

    def check_packages(self) -> None:
        if find_spec("pyarrow") is None:
            raise DataError(
                f"{self.path} is a parquet file, and writing those needs pyarrow.",
                hint="pip install 'lapclip[parquet]', or --out with a name that ends in .npz",
            )

    def read_about(self) -> Any:
        from pyarrow import parquet

        return json.loads((parquet.read_schema(self.path).metadata or {})[ABOUT.encode()])

    def write(self, found: Embedded) -> None:
        import pyarrow
        from pyarrow import parquet

        width = found.image_ND.shape[1]
        vector, text = pyarrow.list_(pyarrow.float32(), width), pyarrow.string()
        columns = {"path": text, "captions": pyarrow.list_(text), "split": text, "vector": vector}
        if found.has_texts:
            columns["caption_vectors"] = pyarrow.list_(vector)
        told = {FINGERPRINT: found.about[FINGERPRINT], ABOUT: json.dumps(found.about)}
        schema = pyarrow.schema(list(columns.items()), metadata=told)

        def vectors(rows: np.ndarray) -> pyarrow.Array:
            return pyarrow.FixedSizeListArray.from_arrays(np.ascontiguousarray(rows, np.float32).ravel(), width)

        def write(partial: Path) -> None:
            # Vectors do not repeat, so a dictionary of their numbers would be made for nothing.
            with parquet.ParquetWriter(partial, schema, use_dictionary=False) as writer:
                for piece in found.pieces():
                    rows = piece.rows
                    values = {
                        "path": [_in_unicode(row.image.name) for row in rows],
                        "captions": [list(row.captions) for row in rows],
                        "split": [row.split for row in rows],
                    }
                    arrays = [pyarrow.array(values[name], columns[name]) for name in values]
                    arrays.append(vectors(piece.image_ND))
                    if found.has_texts:
                        ends = np.cumsum([0, *(len(row.captions) for row in rows)], dtype=np.int32)
                        arrays.append(pyarrow.ListArray.from_arrays(ends, vectors(piece.text_MD)))
                    writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        write_atomic(self.path, write, durable=True)


class NpzFile(VectorFile):
    """Arrays by name, as `--teacher` reads them too: `image` and `pictures`, `text` and `captions`."""

    ending = ".npz"

    def check_rows(self, rows: Sequence[Row]) -> None:
        texts = {
            "names": (len(rows), max((len(row.image.name) for row in rows), default=0)),
            "captions": (
                sum(len(row.captions) for row in rows),
                max((len(caption) for row in rows for caption in row.captions), default=0),
            ),
        }
        for what, (count, longest) in texts.items():
            if 4 * count * longest > LARGEST_TEXTS:
                raise DataError(
                    f"In an npz, {count:,} {what} would take {size(4 * count * longest)}, because the longest has "
                    f"{longest:,} characters and each takes as much room.",
                    hint="--out with a name that ends in .parquet",
                )

    def read_about(self) -> Any:
        with np.load(self.path, allow_pickle=False) as file:
            return json.loads(file[ABOUT].item())

    def write(self, found: Embedded) -> None:
        def write(partial: Path) -> None:
            with zipfile.ZipFile(partial, "w") as file:
                _write_array(file, "image", *_described(found.image_ND), (piece.image_ND for piece in found.pieces()))
                _write_texts(file, "pictures", lambda piece: [row.image.name for row in piece.rows], found)
                _write_texts(file, "split", lambda piece: [row.split for row in piece.rows], found)
                if found.has_texts:
                    _write_array(file, "text", *_described(found.text_MD), (piece.text_MD for piece in found.pieces()))
                    _write_texts(file, "captions", _captions, found)
                    _write_array(file, "picture_of_caption", (len(found.text_MD),), np.dtype("<i8"), _owners(found))
                for name, text in ((FINGERPRINT, found.about[FINGERPRINT]), (ABOUT, json.dumps(found.about))):
                    one = np.array(text)
                    _write_array(file, name, (), one.dtype, [one])

        write_atomic(self.path, write, durable=True)


class NpyFile(VectorFile):
    """The vectors of images alone, and beside them a .json that says what each row is."""

    ending, embeds_captions = ".npy", False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.json = path.with_suffix(".json")
        self.paths = [path, self.json]

    def read_about(self) -> Any:
        with open(self.json, encoding="utf-8") as file:
            first = file.readline(1_000_000)  # the rest may be large
        return parse_json(first.strip().removesuffix(",") + "}")[ABOUT]

    def write(self, found: Embedded) -> None:
        def vectors(partial: Path) -> None:
            with open(partial, "wb") as file:
                _write_npy(file, *_described(found.image_ND), (piece.image_ND for piece in found.pieces()))

        def facts(partial: Path) -> None:
            told = json.dumps({FINGERPRINT: found.about[FINGERPRINT], ABOUT: found.about})
            with open(partial, "w", encoding="utf-8", newline="\n") as file:
                file.write(f'{told[:-1]},\n"rows": [')
                between = "\n"
                for piece in found.pieces():
                    for row in piece.rows:
                        about = {"path": row.image.name, "captions": row.captions, "split": row.split}
                        file.write(f"{between}{json.dumps(about)}")
                        between = ",\n"
                file.write("\n]}\n")

        write_atomic(self.path, vectors, durable=True)
        write_atomic(self.json, facts, durable=True)  # last: by it the file is known to be whole


FORMS: dict[str, type[VectorFile]] = {form.ending: form for form in (ParquetFile, NpzFile, NpyFile)}


def vector_file(path: Path) -> VectorFile:
    """The file at a path, in the form that its ending says."""
    form = FORMS.get(path.suffix.lower())
    if form is None:
        raise DataError(
            f"--out {path} does not say which kind of file.", hint=f"a name that ends in {', '.join(FORMS)}"
        )
    return form(path)


def _in_unicode(name: str) -> str:
    """A file's name, of which bytes that are no text are written as they are escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _captions(piece: Piece) -> list[str]:
    return [caption for row in piece.rows for caption in row.captions]


def _owners(found: Embedded) -> Iterator[np.ndarray]:
    """The row of the image of each caption."""
    first = 0
    for piece in found.pieces():
        counts = [len(row.captions) for row in piece.rows]
        yield np.repeat(np.arange(first, first + len(counts), dtype="<i8"), counts)
        first += len(counts)


def _described(array: np.ndarray) -> tuple[tuple[int, ...], np.dtype]:
    return array.shape, array.dtype


def _write_texts(file: zipfile.ZipFile, name: str, texts_of: Any, found: Embedded) -> None:
    count = longest = 0
    for piece in found.pieces():
        texts = texts_of(piece)
        count, longest = count + len(texts), max(longest, *map(len, texts)) if texts else longest
    kind = np.dtype(f"<U{max(1, longest)}")
    arrays = (np.array(texts_of(piece), dtype=kind) for piece in found.pieces())
    _write_array(file, name, (count,), kind, arrays, zipfile.ZIP_DEFLATED)


def _write_array(
    file: zipfile.ZipFile,
    name: str,
    shape: tuple[int, ...],
    kind: np.dtype,
    parts: Iterable[np.ndarray],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """An array in an npz, part after part."""
    entry = zipfile.ZipInfo(f"{name}.npy")
    entry.compress_type = compression
    with file.open(entry, "w", force_zip64=True) as inside:
        _write_npy(inside, shape, kind, parts)


def _write_npy(file: IO[bytes], shape: tuple[int, ...], kind: np.dtype, parts: Iterable[np.ndarray]) -> None:
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    for part in parts:
        file.write(np.ascontiguousarray(part, kind).tobytes())

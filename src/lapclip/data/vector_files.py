"""Files of vectors: Parquet, or `.npy` with names beside it.

NAME.parquet       a row for each image: path, captions, split, vector and caption_vectors
NAME.npy           vectors of images
NAME-captions.npy  vectors of captions, one image's after the other's
NAME.json          fingerprint of the model, lapclip (what else is known), and rows: path, captions
                   and split of each image

Vectors of captions are there if the data has captions. Files are written whole or not at all. What
a file says of itself tells ours from those of others, which are never replaced. A teacher's vectors
are read from the same files, also from those made by hand.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.data.table import Row
from lapclip.errors import DataError
from lapclip.paths import parse_json
from lapclip.suggest import install
from lapclip.user_files import refusal, write_user_files

ABOUT, FINGERPRINT = "lapclip", "fingerprint"
BLOCK_IMAGES = 4096  # images in memory at once while a Parquet file is written
MAX_ABOUT_CHARACTERS = 32_000_000  # a thousand paths of unreadable images, as long as paths can be


@dataclass(frozen=True)
class Embedded:
    """Content of a file that is to be written."""

    about: dict[str, Any]
    rows: Sequence[Row]
    kept: np.ndarray
    """Which rows have a vector, in order."""
    images: np.ndarray
    captions: np.ndarray
    """Vectors of all captions, one image's after the other's. No rows if captions are not embedded."""

    def kept_rows(self) -> Iterator[Row]:
        for row in self.kept.tolist():
            yield self.rows[row]


@dataclass(frozen=True)
class NamedVectors:
    """Content of a file that was read."""

    paths: list[str]
    captions: list[str]
    """All captions, one image's after the other's."""
    image_vectors: np.ndarray
    caption_vectors: np.ndarray | None


class VectorFile(ABC):
    """A file of vectors in one form."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def paths(self) -> list[Path]:
        """All files that belong to it and are there."""
        return [self.path] if self.path.exists() or self.path.is_symlink() else []

    @property
    def other_name(self) -> str:
        """Hint for another name."""
        stem = f"{self.path.stem}-vectors"
        return f"--out with another name, such as {self.path.with_stem(stem)}"

    def check_free(self, *, is_unfinished: bool) -> dict[str, Any] | None:
        """Return what is known of the file that is there, or None without one.

        Raise ConfigError for a file that lapclip did not write.
        After a kill between the files of one writing, while `is_unfinished`, they count as none.
        """
        if not self.paths:
            return None
        try:
            about = self.read_about()
        except Exception:  # whatever readers stumble on: it is something else
            about = None
        if isinstance(about, dict) and self.is_whole(about):
            return about
        if isinstance(about, dict) and is_unfinished:
            return None
        raise refusal(self.paths[0], self.other_name)

    def is_whole(self, about: dict[str, Any]) -> bool:
        """Return whether all files that belong to it are from one writing."""
        return True

    def check_packages(self) -> None:  # noqa: B027
        """Raise DataError if a package is missing."""

    @abstractmethod
    def read_about(self) -> Any:
        """Return what the file says of itself. Raises what its reader raises for other files."""

    @abstractmethod
    def write(self, content: Embedded) -> None: ...

    @abstractmethod
    def read(self) -> NamedVectors: ...


class ParquetFile(VectorFile):
    """A row for each image, with lists of its captions and of their vectors."""

    def check_packages(self) -> None:
        if find_spec("pyarrow") is None:
            raise DataError(
                f"{self.path} is a Parquet file, which needs pyarrow.",
                hint=f"{install('parquet')}, or a name that ends in .npy",
            )

    def read_about(self) -> Any:
        from pyarrow import parquet

        return json.loads((parquet.read_schema(self.path).metadata or {})[ABOUT.encode()])

    def read(self) -> NamedVectors:
        self.check_packages()
        from pyarrow import parquet

        table = parquet.read_table(self.path)
        missing = {"path", "captions", "vector"} - set(table.column_names)
        if missing:
            raise DataError(f"{self.path} has no column {min(missing)}.")
        captions = list(itertools.chain.from_iterable(table.column("captions").to_pylist()))
        caption_vectors = None
        if "caption_vectors" in table.column_names:
            lists = table.column("caption_vectors").to_pylist()
            caption_vectors = np.array(list(itertools.chain.from_iterable(lists)))
        vectors = np.array(table.column("vector").to_pylist())
        return NamedVectors(table.column("path").to_pylist(), captions, vectors, caption_vectors)

    def write(self, content: Embedded) -> None:
        import pyarrow
        from pyarrow import parquet

        width = content.images.shape[1]
        text, vector = pyarrow.string(), pyarrow.list_(pyarrow.float32(), width)
        columns = {"path": text, "captions": pyarrow.list_(text), "split": text, "vector": vector}
        if len(content.captions):
            columns["caption_vectors"] = pyarrow.list_(vector)
        about = {FINGERPRINT: content.about[FINGERPRINT], ABOUT: json.dumps(content.about)}
        schema = pyarrow.schema(list(columns.items()), metadata=about)

        def as_vectors(block: np.ndarray) -> Any:
            flat = np.ascontiguousarray(block, np.float32).ravel()
            return pyarrow.FixedSizeListArray.from_arrays(flat, width)

        def write(partial: Path) -> None:
            first_caption = 0
            # Vectors do not repeat, so a dictionary of their numbers would be made for nothing.
            with parquet.ParquetWriter(partial, schema, use_dictionary=False) as writer:
                for first_image in range(0, len(content.kept), BLOCK_IMAGES):
                    last_image = first_image + BLOCK_IMAGES
                    kept = content.kept[first_image:last_image].tolist()
                    rows = [content.rows[row] for row in kept]
                    arrays = [
                        pyarrow.array([escaped(row.image.name) for row in rows], text),
                        pyarrow.array([list(row.captions) for row in rows], columns["captions"]),
                        pyarrow.array([row.split for row in rows], text),
                        as_vectors(content.images[first_image:last_image]),
                    ]
                    if len(content.captions):
                        ends = np.cumsum([0, *(len(row.captions) for row in rows)], dtype=np.int32)
                        last_caption = first_caption + int(ends[-1])
                        values = as_vectors(content.captions[first_caption:last_caption])
                        arrays.append(pyarrow.ListArray.from_arrays(ends, values))
                        first_caption = last_caption
                    writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        write_user_files({self.path: write}, replace_any=True, hint="--out in another folder")


class NpyFile(VectorFile):
    """Arrays, and a `.json` that says what each row is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.json = path.with_suffix(".json")
        self.captions = path.with_stem(f"{path.stem}-captions")

    @property
    def paths(self) -> list[Path]:
        files = (self.path, self.captions, self.json)
        return [file for file in files if file.exists() or file.is_symlink()]

    def read_about(self) -> Any:
        with open(self.json, encoding="utf-8") as file:
            first = file.readline(MAX_ABOUT_CHARACTERS)  # the rows follow, and may be many
        return parse_json(first.strip().removesuffix(",") + "}")[ABOUT]

    def is_whole(self, about: dict[str, Any]) -> bool:
        return about.get("sha256") == {path.name: sha256_of(path) for path in self.paths[:-1]}

    def read(self) -> NamedVectors:
        content = parse_json(self.json.read_text(encoding="utf-8"))
        about = content.get(ABOUT)
        if isinstance(about, dict) and "sha256" in about and not self.is_whole(about):
            raise DataError(
                f"{self.path} and {self.json.name} are not from one writing.",
                hint="lapclip embed DATA --out NEW_NAME.npy",
            )
        rows = content["rows"]
        captions = list(itertools.chain.from_iterable(row.get("captions", ()) for row in rows))
        caption_vectors = None
        if self.captions.exists():
            caption_vectors = np.load(self.captions, allow_pickle=False)
        vectors = np.load(self.path, allow_pickle=False)
        return NamedVectors([row["path"] for row in rows], captions, vectors, caption_vectors)

    def write(self, content: Embedded) -> None:
        digests: dict[str, str] = {}

        def writer_of(path: Path, vectors: np.ndarray) -> Any:
            def write(partial: Path) -> None:
                # Not np.save, which takes the file from Python and misses a disk that fills up at its end.
                rows = np.ascontiguousarray(vectors)
                header = np.lib.format.header_data_from_array_1_0(rows)
                with open(partial, "wb") as file:
                    np.lib.format.write_array_header_1_0(file, header)
                    file.write(rows.data)
                digests[path.name] = sha256_of(partial)

            return write

        def write_names(partial: Path) -> None:
            about = {
                FINGERPRINT: content.about[FINGERPRINT],
                ABOUT: {**content.about, "sha256": digests},
            }
            with open(partial, "w", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(about).removesuffix("}") + ',\n"rows": [')
                separator = "\n"
                for row in content.kept_rows():
                    names = {"path": row.image.name, "captions": row.captions, "split": row.split}
                    file.write(separator + json.dumps(names))
                    separator = ",\n"
                file.write("\n]}\n")

        files = {self.path: writer_of(self.path, content.images)}
        if len(content.captions):
            files[self.captions] = writer_of(self.captions, content.captions)
        else:
            self.captions.unlink(missing_ok=True)
        files[self.json] = write_names
        write_user_files(files, replace_any=True, hint="--out in another folder")


FORMS: dict[str, type[VectorFile]] = {".parquet": ParquetFile, ".npy": NpyFile}


def vector_file(path: Path) -> VectorFile:
    """Return the file at a path, in the form that its ending says."""
    form = FORMS.get(path.suffix.lower())
    if form is None:
        endings = " or ".join(FORMS)
        raise DataError(f"{path} is no file of vectors.", hint=f"a name that ends in {endings}")
    return form(path)


def is_vector_file(name: str) -> bool:
    """Return whether a name is that of a file of vectors."""
    return Path(name).suffix.lower() in FORMS


def escaped(name: str) -> str:
    """Return the name of a file with bytes that are no text escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Files of vectors for other programs: parquet, npz and npy, each written piece by piece and whole or not at all.

Each tells which model made it, by its fingerprint, and what else is known of it (`about`); by that a file is also known
as one of ours, which may be replaced.

Shapes: N images, M captions, D the embedding.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import filelock
import numpy as np

from lapclip.data.table import Row
from lapclip.errors import DataError, RunBusy, first_line
from lapclip.paths import parse_json
from lapclip.suggest import install
from lapclip.text import size
from lapclip.user_files import refusal, write_user_files

ABOUT, FINGERPRINT = "lapclip", "fingerprint"
"""Under which names a file tells what is known of it, as JSON, and which model made it."""
VECTORS_DIGEST = "vectors_sha256"
"""Under which name a file beside the vectors tells which vectors it belongs to."""
PIECE = 4096
"""Images at once, with their captions: what is in memory while a file is written."""
LARGEST_ABOUT = 32_000_000
"""Characters of what a file tells of itself: a thousand paths of images that were left out, as long as paths can be."""
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
            raise refusal(there[0], self.other_name)
        if about is None or len(there) < len(self.paths):
            return None
        if self.is_whole(about):
            return about
        if not UnfinishedVectors(
            self.path
        ).folder.exists():  # so no process was killed between the two files
            raise refusal(self.path, self.other_name)
        return None

    def is_whole(self, about: dict[str, Any]) -> bool:
        """Whether all the files that belong to it are of one writing."""
        return True

    @property
    def other_name(self) -> str:
        """A hint for another name."""
        return (
            f"--out with another name, such as {self.path.with_stem(f'{self.path.stem}-vectors')}"
        )

    def write_files(self, contents: Mapping[Path, Callable[[Path], object]]) -> None:
        """Write all of it, and only then let it take the place of what was there."""
        self.check_free()
        write_user_files(contents, replace_any=True, hint="--out in another folder")

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
                hint=f"{install('parquet')}, or --out with a name that ends in .npz",
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
            return pyarrow.FixedSizeListArray.from_arrays(
                np.ascontiguousarray(rows, np.float32).ravel(), width
            )

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

        self.write_files({self.path: write})


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
                _write_array(
                    file,
                    "image",
                    *_described(found.image_ND),
                    (piece.image_ND for piece in found.pieces()),
                )
                _write_texts(
                    file, "pictures", lambda piece: [row.image.name for row in piece.rows], found
                )
                _write_texts(file, "split", lambda piece: [row.split for row in piece.rows], found)
                if found.has_texts:
                    _write_array(
                        file,
                        "text",
                        *_described(found.text_MD),
                        (piece.text_MD for piece in found.pieces()),
                    )
                    _write_texts(file, "captions", _captions, found)
                    _write_array(
                        file,
                        "picture_of_caption",
                        (len(found.text_MD),),
                        np.dtype("<i8"),
                        _owners(found),
                    )
                for name, text in (
                    (FINGERPRINT, found.about[FINGERPRINT]),
                    (ABOUT, json.dumps(found.about)),
                ):
                    one = np.array(text)
                    _write_array(file, name, (), one.dtype, [one])

        self.write_files({self.path: write})


class NpyFile(VectorFile):
    """The vectors of images alone, and beside them a .json that says what each row is."""

    ending, embeds_captions = ".npy", False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.json = path.with_suffix(".json")
        self.paths = [path, self.json]

    def read_about(self) -> Any:
        with open(self.json, encoding="utf-8") as file:
            first = file.readline(LARGEST_ABOUT)  # the rest may be large
        return parse_json(first.strip().removesuffix(",") + "}")[ABOUT]

    def is_whole(self, about: dict[str, Any]) -> bool:
        expected = about.get(VECTORS_DIGEST)
        if expected is None:  # written before there was one
            return True
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest() == expected

    def write(self, found: Embedded) -> None:
        digest = hashlib.sha256()

        def vectors(partial: Path) -> None:
            with open(partial, "wb") as file:
                both = _Digesting(file, digest)
                _write_npy(
                    both, *_described(found.image_ND), (piece.image_ND for piece in found.pieces())
                )

        def facts(partial: Path) -> None:
            about = {**found.about, VECTORS_DIGEST: digest.hexdigest()}
            told = json.dumps({FINGERPRINT: found.about[FINGERPRINT], ABOUT: about})
            with open(partial, "w", encoding="utf-8", newline="\n") as file:
                file.write(f'{told[:-1]},\n"rows": [')
                between = "\n"
                for piece in found.pieces():
                    for row in piece.rows:
                        about = {
                            "path": row.image.name,
                            "captions": row.captions,
                            "split": row.split,
                        }
                        file.write(f"{between}{json.dumps(about)}")
                        between = ",\n"
                file.write("\n]}\n")

        self.write_files(
            {self.path: vectors, self.json: facts}
        )  # by its digest both are known to belong together


class _Digesting:
    """A file that is written, and the digest of it."""

    def __init__(self, file: IO[bytes], digest: Any) -> None:
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)


FORMS: dict[str, type[VectorFile]] = {form.ending: form for form in (ParquetFile, NpzFile, NpyFile)}


def vector_file(path: Path) -> VectorFile:
    """The file at a path, in the form that its ending says."""
    form = FORMS.get(path.suffix.lower())
    if form is None:
        raise DataError(
            f"--out {path} does not say which kind of file.",
            hint=f"a name that ends in {', '.join(FORMS)}",
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


def _write_npy(
    file: Any, shape: tuple[int, ...], kind: np.dtype, parts: Iterable[np.ndarray]
) -> None:
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    for part in parts:
        file.write(np.ascontiguousarray(part, kind).tobytes())


ENDING, JOURNAL, LOCK = ".unfinished", "journal.jsonl", "lock"
KIND = np.dtype("<f4")


class UnfinishedVectors:
    """What is done of a file of vectors."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.folder = file.with_name(f"{file.name}{ENDING}")
        self._journal = self.folder / JOURNAL
        self._vectors = {name: self.folder / f"{name}.f32" for name in ("image", "text")}
        self._forget()

    def _forget(self) -> None:
        self.about: dict[str, Any] | None = None
        """What was begun; None where that is nothing."""
        self.rows = 0
        """Rows of the data that are done, with a vector or without."""
        self.counts = {"image": 0, "text": 0}
        """Vectors."""
        self.unreadable: list[tuple[int, str]] = []
        """Rows without a vector, and why."""
        self.passing = 0
        """How many of them may have one the next time: the fault was not the image's."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Read what is there, and keep other processes out until the end."""
        lock = filelock.FileLock(self.folder / LOCK)
        try:
            self.folder.mkdir(
                0o700, parents=True, exist_ok=True
            )  # it tells the names of what may be private photos
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RunBusy(
                f"Another process is writing {self._file}.", hint="wait for it, or another --out"
            ) from None
        except (OSError, NotImplementedError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise DataError(
                f"Cannot write to {self.folder}: {why}.", hint="--out in another folder"
            ) from error
        try:
            self._read()
            yield
        finally:
            nothing = not self._journal.exists()  # never begun, or finished
            if os.name == "nt":  # which removes no file that is open
                lock.release()
            if nothing:
                with suppress(OSError):
                    for path in (*self._vectors.values(), self.folder / LOCK):
                        path.unlink(missing_ok=True)
                    self.folder.rmdir()
            lock.release()

    def begin(self, about: dict[str, Any]) -> None:
        """Start anew."""
        self._journal.unlink(missing_ok=True)  # first: without it the vectors do not count
        self._forget()
        self.about = about
        for path in self._vectors.values():
            path.write_bytes(b"")
        self._add_line(about)

    def save(
        self,
        rows: int,
        image_ND: np.ndarray,
        text_MD: np.ndarray,
        unreadable: Sequence[tuple[int, str]],
        passing: int = 0,
    ) -> None:
        """Add vectors of images and of their captions, after which so many rows of the data are done."""
        for (name, path), vectors in zip(self._vectors.items(), (image_ND, text_MD), strict=True):
            if len(vectors):
                with open(path, "ab") as file:
                    file.write(np.ascontiguousarray(vectors, KIND).tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                self.counts[name] += len(vectors)
        self.rows = rows
        self.unreadable += unreadable
        self.passing += passing
        self._add_line(
            {"rows": rows, **self.counts, "unreadable": list(unreadable), "passing": passing}
        )

    def vectors(self, name: str) -> np.ndarray:
        """All vectors of images or of captions, memory-mapped."""
        assert self.about is not None
        shape = (self.counts[name], self.about["dimension"])
        if not shape[0]:  # an empty file cannot be mapped
            return np.zeros(shape, KIND)
        return np.memmap(self._vectors[name], KIND, "r", shape=shape)

    def done(self) -> None:
        """Nothing of it is needed any more."""
        self._journal.unlink()

    def _add_line(self, values: dict[str, Any]) -> None:
        with open(self._journal, "ab") as file:
            file.write(json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """What is there, up to the first line that is not whole or whose vectors are missing; the rest is cut off."""
        self._forget()
        with (
            suppress(FileNotFoundError, ValueError, KeyError, TypeError),
            open(self._journal, "rb") as file,
        ):
            about = parse_json(file.readline().decode())
            row_bytes = KIND.itemsize * int(about["dimension"])
            room = {name: path.stat().st_size // row_bytes for name, path in self._vectors.items()}
            self.about, good = about, file.tell()
            with suppress(ValueError, KeyError, TypeError):
                for line in file:
                    said = parse_json(line.decode()) if line.endswith(b"\n") else {}
                    counts = {name: int(said[name]) for name in self.counts}
                    unreadable = [(int(row), str(why)) for row, why in said["unreadable"]]
                    if any(counts[name] > room[name] for name in counts):
                        break
                    self.rows, self.counts = int(said["rows"]), counts
                    self.unreadable += unreadable
                    self.passing += int(
                        said.get("passing", len(unreadable))
                    )  # not told by earlier versions
                    good += len(line)
            os.truncate(self._journal, good)
            for name, path in self._vectors.items():
                os.truncate(path, self.counts[name] * row_bytes)

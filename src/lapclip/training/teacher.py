"""Teachers for distillation: their embeddings of the training pairs, computed once and cached.

A teacher is a model, or a file of vectors (`lapclip.data.vector_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from lapclip.config import Config, DataConfig
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.loading import load_as_seen
from lapclip.data.pixels import View
from lapclip.data.vector_files import NamedVectors, is_vector_file, vector_file
from lapclip.embedder import Embedder, distinct_captions, load_torch
from lapclip.errors import ConfigError, DataError, LapclipError, RunError, first_line
from lapclip.join.agreement import Agreement
from lapclip.paths import digest_of_bytes
from lapclip.progress import DataProgress, ignore_progress
from lapclip.text import printable
from lapclip.training.array_cache import array_path, read_array, write_array
from lapclip.training.objectives.distillation import TeacherVectors
from lapclip.which_model import which_model

EMBEDDING_IMAGES = "the teacher embeds images"
EMBEDDING_CAPTIONS = "the teacher embeds captions"
HOW_TO_MAKE = "docs/distil.md shows how to make one"
FLOAT32 = np.dtype(np.float32)
# Raised for a file that is damaged, or has another form.
FILE_ERRORS = (OSError, ValueError, TypeError, AttributeError, LookupError, EOFError)


class Teacher(Protocol):
    """A source of embeddings for images and captions."""

    digest: str
    """Digest of everything that the embeddings depend on."""

    def embed(self, config: DataConfig, pairs: Pairs, progress: DataProgress) -> TeacherVectors:
        """Return vectors of all images and captions, as wide as the teacher makes them."""
        ...


class TeacherModel:
    """A trained model. It sees images with its own size and crop, not with those of the student."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.digest = embedder.fingerprint()

    def embed(self, config: DataConfig, pairs: Pairs, progress: DataProgress) -> TeacherVectors:
        def report_images(done: int, total: int) -> None:
            progress(done, total, EMBEDDING_IMAGES)

        def report_captions(done: int, total: int) -> None:
            progress(done, total, EMBEDDING_CAPTIONS)

        pixels = load_as_seen(config, pairs, View.of(self._embedder.model.shape), progress)
        images = self._embedder.encode_pixels(pixels, report_images)
        captions, which, _ = distinct_captions(pairs)
        texts = self._embedder.encode_text(captions, report_captions)
        return TeacherVectors(images, texts[which])


class TeacherFile:
    """A file of vectors. It may have more images and captions than the data."""

    def __init__(self, path: Path) -> None:
        self._path = path
        vectors = self._read()
        if vectors.caption_vectors is None:
            raise DataError(f"{path} has no vectors of captions.", hint=HOW_TO_MAKE)
        self._images = self._unit_rows(vectors.image_vectors, vectors.paths, "image")
        self._captions = self._unit_rows(vectors.caption_vectors, vectors.captions, "caption")
        image_width, caption_width = self._images.shape[1], self._captions.shape[1]
        if image_width != caption_width:
            raise DataError(
                f"{path} has vectors of {image_width} numbers for images "
                f"and of {caption_width} for captions.",
                hint=HOW_TO_MAKE,
            )
        self._row_of_image = {name: row for row, name in enumerate(vectors.paths)}
        self._row_of_caption = {caption: row for row, caption in enumerate(vectors.captions)}

    def _read(self) -> NamedVectors:
        """Read the file, and set the digest. Raise DataError if it cannot be read."""
        try:
            file = vector_file(self._path)
            vectors = file.read()
            self.digest = digest_of_bytes(b"".join(part.read_bytes() for part in file.paths))
            return vectors
        except FileNotFoundError as error:
            raise DataError(f"There is no file {error.filename}.", hint=HOW_TO_MAKE) from None
        except FILE_ERRORS as error:
            raise DataError(
                f"{self._path} cannot be read: {first_line(error)}.", hint=HOW_TO_MAKE
            ) from None

    def embed(self, config: DataConfig, pairs: Pairs, progress: DataProgress) -> TeacherVectors:
        if not pairs.names:
            raise DataError(
                f"{self._path} has vectors by file name, and drawn scenes are no files.",
                hint="--teacher with a model",
            )
        captions = list(chain.from_iterable(pairs.captions))
        image_rows = self._rows(self._row_of_image, pairs.names, "image")
        caption_rows = self._rows(self._row_of_caption, captions, "caption")
        return TeacherVectors(self._images[image_rows], self._captions[caption_rows])

    def _rows(self, row_of: dict[str, int], names: Sequence[str], kind: str) -> list[int]:
        """Return the row of each image or caption. Raise DataError if the file lacks one."""
        missing = list(dict.fromkeys(name for name in names if name not in row_of))
        if missing:
            more = ""
            if len(missing) > 1:
                more = f", nor for {len(missing) - 1:,} more"
            raise DataError(
                f'{self._path} has no vector for the {kind} "{printable(missing[0])}"{more}.',
                hint=HOW_TO_MAKE,
            )
        return [row_of[name] for name in names]

    def _unit_rows(self, vectors: np.ndarray, names: Sequence[str], kind: str) -> np.ndarray:
        """Return the vectors with unit length. Raise DataError if they are not embeddings."""
        is_table = vectors.ndim == 2 and np.issubdtype(vectors.dtype, np.floating)
        if not is_table or len(vectors) != len(names):
            raise DataError(
                f"{self._path} has {vectors.dtype} of shape {vectors.shape} "
                f"for {len(names):,} {kind}s.",
                hint=HOW_TO_MAKE,
            )
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
        if len(bad):
            raise DataError(
                f'{self._path}: the vector of the {kind} "{printable(names[bad[0]])}" '
                "is zero or not finite.",
                hint=HOW_TO_MAKE,
            )
        return (vectors / lengths).astype(np.float32)


@dataclass(frozen=True)
class TeacherEmbeddings:
    """A teacher's vectors of the training pairs, as wide as the embeddings of the student."""

    vectors: TeacherVectors
    digest: str
    """Digest of the teacher."""
    note: str
    """Description for the user."""


def open_teacher(config: Config) -> Teacher | None:
    """Return the teacher that the settings name. None without one."""
    name = config.train.teacher
    if not name:
        return None
    if Agreement.of_this_process():
        raise ConfigError("A guest opens no teacher, and the host did not send its vectors.")
    try:
        if is_vector_file(name):
            return TeacherFile(Path(name))
        return TeacherModel(load_torch(which_model(name).path, config.train.device))
    except LapclipError as error:
        raise ConfigError(
            f"The teacher cannot be used. {error.message}",
            hint=error.hint or "--teacher with a run or a model",
        ) from error


def compute_teacher_embeddings(
    teacher: Teacher, config: Config, data: DataSet, progress: DataProgress | None
) -> TeacherEmbeddings:
    """Return a teacher's embeddings of the training pairs. Computes and caches them if needed."""
    cached = cached_teacher_embeddings(teacher.digest, config, data)
    if cached:
        return cached
    vectors = teacher.embed(config.data, data.train, progress or ignore_progress)
    fitted = fit_width(vectors, config.model.embedding)
    image_path, caption_path = teacher_paths(teacher.digest, config, data)
    write_array(image_path, [fitted.images], fitted.images.shape, FLOAT32)
    write_array(caption_path, [fitted.captions], fitted.captions.shape, FLOAT32)
    # Read back, because cached arrays are memory-mapped.
    cached = cached_teacher_embeddings(teacher.digest, config, data)
    assert cached is not None
    return cached


def cached_teacher_embeddings(
    digest: str, config: Config, data: DataSet
) -> TeacherEmbeddings | None:
    """Return cached embeddings by the teacher with this digest. None if they are not cached."""
    image_path, caption_path = teacher_paths(digest, config, data)
    images = read_array(image_path)
    captions = read_array(caption_path)
    if images is None or captions is None:
        return None
    note = (
        f"{config.train.teacher} teaches: {len(images):,} images "
        f"and {len(captions):,} captions, cached"
    )
    return TeacherEmbeddings(TeacherVectors(images, captions), digest, note)


def restore_teacher_embeddings(
    digest: str, config: Config, data: DataSet, progress: DataProgress | None
) -> TeacherEmbeddings | None:
    """Return the embeddings that a resumed run began with. None for a run without a teacher.

    Needs the teacher only if its embeddings are no longer cached.
    """
    if not config.train.teacher:
        return None
    cached = cached_teacher_embeddings(digest, config, data)
    if cached:
        return cached
    hint = "the teacher as it was, where it was, or a new run"
    try:
        teacher = open_teacher(config)
    except ConfigError as error:
        raise RunError(
            f"The cache no longer has what the teacher made. {error.message}", hint=hint
        ) from error
    assert teacher is not None
    if teacher.digest != digest:
        raise RunError(
            f"{config.train.teacher} is not the teacher that the run began with.", hint=hint
        )
    return compute_teacher_embeddings(teacher, config, data, progress)


def fit_width(vectors: TeacherVectors, width: int) -> TeacherVectors:
    """Return vectors of another width and unit length that keep similarities as far as possible.

    Adds zeros to narrower vectors. Projects wider ones to their principal directions, without
    centering, because similarities are products of uncentered vectors.
    """
    images, captions = vectors.images, vectors.captions
    missing = width - images.shape[1]
    if missing >= 0:
        padding = ((0, 0), (0, missing))
        return TeacherVectors(np.pad(images, padding), np.pad(captions, padding))
    # Means, so that images count as much as captions, of which there may be more.
    directions = np.linalg.eigh(_second_moment(images) + _second_moment(captions)).eigenvectors
    principal = directions[:, ::-1][:, :width]  # eigenvalues come in ascending order
    return TeacherVectors(normalize_rows(images @ principal), normalize_rows(captions @ principal))


def _second_moment(rows: np.ndarray) -> np.ndarray:
    return rows.T.astype(np.float64) @ rows / len(rows)


def normalize_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows of unit length."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.maximum(lengths, 1e-12)).astype(np.float32)


def teacher_paths(digest: str, config: Config, data: DataSet) -> tuple[Path, Path]:
    """Return the files of cached embeddings: of images, and of captions."""
    key = ("teacher", digest, data.fingerprint, config.model.embedding)
    return array_path(*key, "image"), array_path(*key, "text")

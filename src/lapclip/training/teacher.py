"""A model that teaches another: its embeddings of the training images and captions, computed once and cached.

The teacher is a model, or a file of vectors by any teacher (`lapclip.data.vector_files`).

Shapes: N images, M captions (one image's after the other's), D the teacher's embedding, E the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from lapclip.config import Config, DataConfig
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.loading import load_as_seen
from lapclip.data.pixels import View
from lapclip.data.vector_files import is_vector_file, vector_file
from lapclip.embedder import Embedder, distinct_captions, load_torch
from lapclip.errors import ConfigError, DataError, LapclipError, RunError, first_line
from lapclip.paths import digest_of_bytes
from lapclip.progress import DataProgress
from lapclip.text import printable
from lapclip.training.frozen_features import array_path, read_array, write_array
from lapclip.which_model import which_model

IMAGES, CAPTIONS = "the teacher embeds images", "the teacher embeds captions"
"""What is being done to so many images."""
HOW_TO_MAKE = "docs/distil.md shows how to make one"


class Teacher(Protocol):
    """Something that knows what images and captions mean."""

    digest: str
    """Changes with anything that its embeddings depend on."""

    def embed(
        self, config: DataConfig, pairs: Pairs, progress: DataProgress | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Unit-length rows for all images (N, D) and for all captions (M, D)."""
        ...


class TeacherModel:
    """A trained model. It sees images its own way, whatever the model that it teaches sees."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.digest = embedder.fingerprint()

    def embed(
        self, config: DataConfig, pairs: Pairs, progress: DataProgress | None
    ) -> tuple[np.ndarray, np.ndarray]:
        report = progress or (lambda done, total, what="", /: None)
        pixels = load_as_seen(config, pairs, View.of(self._embedder.model.shape), progress)
        image_ND = self._embedder.encode_pixels(
            pixels, lambda done, total: report(done, total, IMAGES)
        )
        captions, which, _ = distinct_captions(pairs)
        text_MD = self._embedder.encode_text(
            captions, lambda done, total: report(done, total, CAPTIONS)
        )
        return image_ND, text_MD[which]


class TeacherFile:
    """Embeddings in a file of vectors. Rows that the data has no use for are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file = vector_file(path)
            vectors = file.read()
            self.digest = digest_of_bytes(b"".join(part.read_bytes() for part in file.paths))
        except FileNotFoundError as error:
            raise DataError(f"There is no file {error.filename}.", hint=HOW_TO_MAKE) from None
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            EOFError,
        ) as error:
            raise DataError(
                f"{path} cannot be read: {first_line(error)}.", hint=HOW_TO_MAKE
            ) from None
        if vectors.caption_vectors is None:
            raise DataError(f"{path} has no vectors of captions.", hint=HOW_TO_MAKE)
        self._images = self._unit_rows(vectors.image_vectors, vectors.paths, "image")
        self._captions = self._unit_rows(vectors.caption_vectors, vectors.captions, "caption")
        widths = self._images.shape[1], self._captions.shape[1]
        if widths[0] != widths[1]:
            raise DataError(
                f"{path} has vectors of {widths[0]} numbers for images and of {widths[1]} for captions.",
                hint=HOW_TO_MAKE,
            )
        self._row_of_image = {name: row for row, name in enumerate(vectors.paths)}
        self._row_of_caption = {name: row for row, name in enumerate(vectors.captions)}

    def embed(
        self, config: DataConfig, pairs: Pairs, progress: DataProgress | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return unit-length rows for all images and for all captions."""
        if not pairs.names:
            raise DataError(
                f"{self._path} cannot teach about images that are drawn: they have no names.",
                hint="--teacher with a model",
            )
        captions = [caption for options in pairs.captions for caption in options]
        return (
            self._images[self._rows(self._row_of_image, pairs.names, "image")],
            self._captions[self._rows(self._row_of_caption, captions, "caption")],
        )

    def _rows(self, known: dict[str, int], names: Sequence[str], kind: str) -> list[int]:
        """Return the row of each name."""
        missing = list(dict.fromkeys(name for name in names if name not in known))
        if missing:
            more = ""
            if len(missing) > 1:
                more = f", nor for {len(missing) - 1:,} more"
            raise DataError(
                f'{self._path} has no vector for the {kind} "{printable(missing[0])}"{more}.',
                hint=HOW_TO_MAKE,
            )
        return [known[name] for name in names]

    def _unit_rows(self, vectors: np.ndarray, names: Sequence[str], kind: str) -> np.ndarray:
        """Return vectors of unit length. Raise DataError for what cannot be embeddings."""
        is_table = vectors.ndim == 2 and np.issubdtype(vectors.dtype, np.floating)
        if not is_table or len(vectors) != len(names):
            raise DataError(
                f"{self._path} has {vectors.dtype} of shape {vectors.shape} for {len(names):,} {kind}s.",
                hint=HOW_TO_MAKE,
            )
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
        if len(bad):
            raise DataError(
                f'{self._path}: the vector of the {kind} "{printable(names[bad[0]])}" is zero or not finite.',
                hint=HOW_TO_MAKE,
            )
        return (vectors / lengths).astype(np.float32)


@dataclass(frozen=True)
class TeacherEmbeddings:
    """A teacher's embeddings of the training pairs, in the width of the model that it teaches."""

    image_NE: np.ndarray
    text_ME: np.ndarray
    digest: str
    """The teacher's."""
    note: str
    """What the user should know."""

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """As a plan of batches takes them."""
        return self.image_NE, self.text_ME


def open_teacher(config: Config) -> Teacher | None:
    """The teacher that the settings name, if any."""
    name = config.train.teacher
    if not name:
        return None
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
    """A teacher's embeddings of the training pairs, computed or found in the cache."""
    found = cached_teacher_embeddings(teacher.digest, config, data)
    if found:
        return found
    rows = teacher.embed(config.data, data.train, progress)
    for array, path in zip(
        fit_width(*rows, config.model.embedding),
        teacher_paths(teacher.digest, config, data),
        strict=True,
    ):
        write_array(path, [array], array.shape, np.dtype(np.float32))
    made = cached_teacher_embeddings(teacher.digest, config, data)
    assert made is not None
    return made


def cached_teacher_embeddings(
    digest: str, config: Config, data: DataSet
) -> TeacherEmbeddings | None:
    """The embeddings of the training pairs by the teacher of that digest, where the cache has them."""
    image_NE, text_ME = (read_array(path) for path in teacher_paths(digest, config, data))
    if image_NE is None or text_ME is None:
        return None
    note = f"{config.train.teacher} teaches: {len(image_NE):,} images and {len(text_ME):,} captions, cached"
    return TeacherEmbeddings(image_NE, text_ME, digest, note)


def restore_teacher_embeddings(
    digest: str, config: Config, data: DataSet, progress: DataProgress | None
) -> TeacherEmbeddings | None:
    """The embeddings that a run began with. Its teacher may be gone, as long as the cache has them."""
    if not config.train.teacher:
        return None
    if found := cached_teacher_embeddings(digest, config, data):
        return found
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


def fit_width(
    image_ND: np.ndarray, text_MD: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of another width, still of unit length, with similarities as near as can be: wider ones are turned to
    their main directions, of which the first stay; narrower ones get zeros."""
    given = image_ND.shape[1]
    if given <= width:
        padding = ((0, 0), (0, width - given))
        return np.pad(image_ND, padding), np.pad(text_MD, padding)
    # Images count as much as captions, of which there may be more. Not centred: similarities are products.
    spread_DD = sum(rows.T.astype(np.float64) @ rows / len(rows) for rows in (image_ND, text_MD))
    _, directions_DD = np.linalg.eigh(spread_DD)
    main_DE = directions_DD[:, ::-1][:, :width]
    return unit(image_ND @ main_DE), unit(text_MD @ main_DE)


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of unit length."""
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)).astype(
        np.float32
    )


def teacher_paths(digest: str, config: Config, data: DataSet) -> tuple[Path, Path]:
    """Where the embeddings are cached: of images, and of captions."""
    about = ("teacher", digest, data.fingerprint, config.model.embedding)
    return array_path(*about, "image"), array_path(*about, "text")

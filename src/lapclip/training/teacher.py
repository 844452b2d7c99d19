"""A model that teaches another: what it makes of the training images and captions, computed once and kept.

Shapes: N images, M captions (one image's after the other's), D the teacher's embedding, E the model's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from lapclip.config import Config, DataConfig
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.loading import load_as_seen
from lapclip.data.pixels import View
from lapclip.embedder import Embedder, distinct_captions, load
from lapclip.errors import ConfigError, LapclipError, RunError
from lapclip.progress import DataProgress
from lapclip.training.feature_cache import array_path, read_array, write_array
from lapclip.training.teacher_file import TeacherFile
from lapclip.which_model import which_model

IMAGES, CAPTIONS = "the teacher looks at images", "the teacher reads captions"
"""What is being done to so many images."""


class Teacher(Protocol):
    """Something that knows what images and captions mean."""

    digest: str
    """Changes with anything that its embeddings depend on."""

    def embed(self, config: DataConfig, pairs: Pairs, progress: DataProgress | None) -> tuple[np.ndarray, np.ndarray]:
        """Unit-length rows for all images (N, D) and for all captions (M, D)."""
        ...


class TeacherModel:
    """A trained model. It sees images its own way, whatever the model that it teaches sees."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        digest = hashlib.sha256(json.dumps(embedder.description(), sort_keys=True).encode())
        for name, tensor in embedder.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        self.digest = digest.hexdigest()

    def embed(self, config: DataConfig, pairs: Pairs, progress: DataProgress | None) -> tuple[np.ndarray, np.ndarray]:
        tell = progress or (lambda done, total, what="", /: None)
        pixels = load_as_seen(config, pairs, View.of(self._embedder.model.shape), progress)
        image_ND = self._embedder.encode_pixels(pixels, lambda done, total: tell(done, total, IMAGES))
        captions, which, _ = distinct_captions(pairs)
        text_MD = self._embedder.encode_text(captions, lambda done, total: tell(done, total, CAPTIONS))
        return image_ND, text_MD[which]


@dataclass(frozen=True)
class Lessons:
    """What a teacher makes of the training pairs, in the width of the model that it teaches."""

    image_NE: np.ndarray
    text_ME: np.ndarray
    digest: str
    """The teacher's."""
    said: str
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
        if name.endswith(".npz"):
            return TeacherFile(Path(name))
        return TeacherModel(load(which_model(name).path, config.train.device))
    except LapclipError as error:
        raise ConfigError(
            f"The teacher cannot be used. {error.message}", hint=error.hint or "--teacher with a run or a model"
        ) from error


def take_lessons(teacher: Teacher, config: Config, data: DataSet, progress: DataProgress | None) -> Lessons:
    """What a teacher makes of the training pairs, computed or found in the cache."""
    found = find_lessons(teacher.digest, config, data)
    if found:
        return found
    rows = teacher.embed(config.data, data.train, progress)
    for array, path in zip(fit_width(*rows, config.model.embedding), _paths(teacher.digest, config, data), strict=True):
        write_array(path, [array], array.shape, np.dtype(np.float32))
    made = find_lessons(teacher.digest, config, data)
    assert made is not None
    return made


def find_lessons(digest: str, config: Config, data: DataSet) -> Lessons | None:
    """What the teacher of that digest made of the training pairs, where the cache has it."""
    image_NE, text_ME = (read_array(path) for path in _paths(digest, config, data))
    if image_NE is None or text_ME is None:
        return None
    said = f"{config.train.teacher} teaches: {len(image_NE):,} images and {len(text_ME):,} captions, kept in the cache"
    return Lessons(image_NE, text_ME, digest, said)


def lessons_again(digest: str, config: Config, data: DataSet, progress: DataProgress | None) -> Lessons | None:
    """The lessons that a run began with. Its teacher may be gone, as long as the cache has them."""
    if not config.train.teacher:
        return None
    if found := find_lessons(digest, config, data):
        return found
    hint = "the teacher as it was, where it was, or lapclip train for a new run"
    try:
        teacher = open_teacher(config)
    except ConfigError as error:
        raise RunError(f"The cache no longer has what the teacher made. {error.message}", hint=hint) from error
    assert teacher is not None
    if teacher.digest != digest:
        raise RunError(f"{config.train.teacher} is not the teacher that the run began with.", hint=hint)
    return take_lessons(teacher, config, data, progress)


def fit_width(image_ND: np.ndarray, text_MD: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of another width, still of unit length, with their similarities kept as well as can be: wider ones are
    turned to their main directions, of which the first stay; narrower ones get zeros."""
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
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def _paths(digest: str, config: Config, data: DataSet) -> tuple[Path, Path]:
    """Where the lessons are kept: of images, and of captions."""
    about = ("teacher", digest, data.fingerprint, config.model.embedding)
    return array_path(*about, "image"), array_path(*about, "text")

"""The model that makes vectors: which one, what runs it, and what tells its vectors from those of others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lapclip import embedder
from lapclip.embedder import Embedder, load
from lapclip.errors import ConfigError, LapclipError, RunError
from lapclip.exporting.description import digest_of, read_description
from lapclip.exporting.engine import open_export
from lapclip.exporting.export_folder import EXPORTED
from lapclip.searching.index import FORMAT
from lapclip.weights.recognise import is_exported
from lapclip.which_model import WhichModel, newest_that_saw_images, which_model

CPU_BATCH = 32
"""Images at once where each takes long: progress is seen, and a killed process loses no more than a batch."""
SMALL = "onnx-int8"
"""The export that may take the place of the model itself."""


@dataclass
class Encoder:
    """Turns images and texts into unit-length vectors."""

    subject: WhichModel
    model: embedder.Encoder
    identity: str
    """Changes with all that decides an image's vector: the image tower, what it sees, and our format."""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.view, self.width = self.model.view, self.model.embedding
        on_cpu = not isinstance(self.model, Embedder) or self.model.device.is_cpu
        self.batch = CPU_BATCH if on_cpu else self.model.batch

    def encode_pixels(self, pixels_NSSC: np.ndarray, /) -> np.ndarray:
        return self.model.encode_pixels(pixels_NSSC)

    def encode_text(self, captions: Sequence[str], /) -> np.ndarray:
        return self.model.encode_text(captions)


def open_encoder(model: str | None, device: str = "auto", made_by: Callable[[], str | None] = lambda: None) -> Encoder:
    """The model that is meant, ready to work. `made_by` gives the identity of the one that made the index so far:
    a form of the model that is as good does not take its place, because all images would have to be read again."""
    subject = which_model(model, newest_that_saw_images)
    if is_exported(subject.path):
        return _checked(_exported(subject, subject.path))
    try:
        found = load(subject.path, device)
    except ConfigError as error:  # a device that is not here, which training would have as a setting
        raise ConfigError(error.message.replace("train.device", "--device"), hint="--device auto") from None
    plain = _checked(Encoder(subject, found, _identity_in_torch(found)))
    if not found.device.is_cpu or subject.made_by is None or plain.identity == made_by():
        return plain
    return _small(subject, found) or plain


def _small(subject: WhichModel, model: Embedder) -> Encoder | None:
    """The run's int8 export, where its check found it faster and no worse; None where there is none such."""
    assert subject.made_by is not None
    folder = subject.made_by.path / EXPORTED / SMALL
    if not is_exported(folder):
        return None
    try:
        about = read_description(folder)
        check = about["check"]
        ratio = next(row["ratio"] for row in check["latency"] if (row["tower"], row["batch"]) == ("image", 32))
        good = (
            check["passed"] and check["recall_after"] >= check["recall_before"] and ratio > 1 and not check.get("busy")
        )
        if not good or about.get("made_from") != digest_of(model.model):
            return None
        note = f"{folder} reads images {ratio:.1f} times as fast, and lost no recall when it was checked: it is used."
        return _checked(_exported(subject, folder, [note]))
    except (LapclipError, KeyError, TypeError, StopIteration):  # the model itself is there
        return None


def _exported(subject: WhichModel, folder: Path, notes: Sequence[str] = ()) -> Encoder:
    model = open_export(folder)
    image = folder / model.about["towers"]["image"]["file"]
    digest = hashlib.sha256(f"{FORMAT} {model.view.key}".encode() + image.read_bytes())
    return Encoder(subject, model, digest.hexdigest()[:32], list(notes))


def _identity_in_torch(model: Embedder) -> str:
    shape, weights = model.model.shape, digest_of(model.model.image)
    seen = f"{FORMAT} {model.view.key} {shape.pixel_mean} {shape.pixel_std} {weights}"
    return hashlib.sha256(seen.encode()).hexdigest()[:32]


def _checked(encoder: Encoder) -> Encoder:
    if not np.isfinite(encoder.encode_text(["an image"])).all():
        path = encoder.subject.path
        raise RunError(f"The model in {path} gives no numbers: its training broke down.", hint="lapclip doctor")
    return encoder

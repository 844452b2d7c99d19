"""The model that makes vectors: which one, and what tells its vectors from those of others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lapclip.data.pixels import View
from lapclip.embedder import Embedder, load
from lapclip.errors import ConfigError, RunError
from lapclip.find.index import FORMAT
from lapclip.find.subject import Subject, choose_subject

CPU_BATCH = 32
"""Pictures at once where each takes long: progress is seen, and a killed process loses no more than a batch."""


class Encoder(Protocol):
    """Turns pictures and texts into unit-length vectors."""

    subject: Subject
    view: View
    width: int
    batch: int

    @property
    def identity(self) -> str: ...
    def encode_pixels(self, pixels_NSSC: np.ndarray, /) -> np.ndarray: ...
    def encode_text(self, captions: Sequence[str], /) -> np.ndarray: ...


@dataclass
class TorchEncoder:
    """A model in torch."""

    subject: Subject
    embedder: Embedder

    def __post_init__(self) -> None:
        shape = self.embedder.model.shape
        self.view, self.width = View.of(shape), shape.embedding
        self.batch = CPU_BATCH if self.embedder.device.is_cpu else self.embedder.batch

    @property
    def identity(self) -> str:
        """Changes with all that decides a picture's vector: the image tower, what it sees, and our format."""
        shape = self.embedder.model.shape
        digest = hashlib.sha256(f"{FORMAT} {self.view.key} {shape.pixel_mean} {shape.pixel_std}".encode())
        for name, tensor in sorted(self.embedder.model.image.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
        return digest.hexdigest()[:32]

    def encode_pixels(self, pixels_NSSC: np.ndarray, /) -> np.ndarray:
        return self.embedder.encode_pixels(pixels_NSSC)

    def encode_text(self, captions: Sequence[str], /) -> np.ndarray:
        return self.embedder.encode_text(captions)


def open_encoder(model: str | None, device: str = "auto") -> Encoder:
    """The model that is meant, ready to work."""
    subject = choose_subject(model)
    try:
        embedder = load(subject.path, device)
    except ConfigError as error:  # a device that is not here, which training would have as a setting
        raise ConfigError(error.message.replace("train.device", "--device"), hint="--device auto") from None
    encoder = TorchEncoder(subject, embedder)
    if not np.isfinite(encoder.encode_text(["a picture"])).all():
        raise RunError(f"The model in {subject.path} gives no numbers: its training broke down.", hint="lapclip doctor")
    return encoder

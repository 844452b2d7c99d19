"""Model, tokenizer and preprocessing as one thing: saved, loaded, and asked for embeddings.

model = lapclip.load("runs/first-run")
images = model.encode_image(["cat.jpg", "dog.jpg"])
captions = model.encode_text(["a cat", "a dog"])
similarity = images @ captions.T
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from PIL import Image

from lapclip.data.dataset import Pairs, Pixels
from lapclip.data.pixels import View, middle_square, normalise
from lapclip.data.tokenizers import Tokenizer
from lapclip.errors import RunError
from lapclip.machine.choose_device import choose_device
from lapclip.machine.cpu import keep_freed_memory
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP
from lapclip.progress import Progress
from lapclip.weights.networks.open_network import build_network
from lapclip.weights.read_model import read_model

BATCH = 64


class Encoder(ABC):
    """Turns images and captions into unit-length vectors that can be compared, whatever computes them."""

    batch = BATCH
    """Images or captions at once."""

    def __init__(self, view: View, tokenizer: Tokenizer, context: int, embedding: int) -> None:
        self.view, self.tokenizer, self.context, self.embedding = view, tokenizer, context, embedding

    @abstractmethod
    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        """Unit-length rows of one batch of uint8 pixels."""

    @abstractmethod
    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Unit-length rows of one batch of tokens."""

    def encode_image(self, pictures: Sequence[str | os.PathLike | Image.Image]) -> np.ndarray:
        """One unit-length row per image, given as paths or as PIL images."""
        if isinstance(pictures, (str, os.PathLike, Image.Image)):
            raise TypeError("encode_image takes a list of images, not one image")
        parts = [
            self.embed_pixels(np.stack([middle_square(image, self.view) for image in pictures[at : at + self.batch]]))
            for at in range(0, len(pictures), self.batch)
        ]
        return self._joined(parts)

    def encode_pixels(self, pixels_NSSC: Pixels, progress: Progress | None = None) -> np.ndarray:
        """One unit-length row per image, given as uint8 pixels of the model's size."""
        parts = []
        for at in range(0, len(pixels_NSSC), self.batch):
            parts.append(self.embed_pixels(np.array(pixels_NSSC[at : at + self.batch])))
            if progress:
                progress(min(at + self.batch, len(pixels_NSSC)), len(pixels_NSSC))
        return self._joined(parts)

    def encode_text(self, captions: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """One unit-length row per caption."""
        if isinstance(captions, str):
            raise TypeError("encode_text takes a list of captions, not one string")
        parts = []
        for at in range(0, len(captions), self.batch):
            parts.append(self.embed_tokens(self.tokenizer.batch(captions[at : at + self.batch], self.context)))
            if progress:
                progress(min(at + self.batch, len(captions)), len(captions))
        return self._joined(parts)

    def encode_pairs(self, pairs: Pairs, progress: Progress | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Embeddings of all images, of all captions, and each caption's image."""
        captions, which, owner = distinct_captions(pairs)
        total = len(pairs) + len(captions)
        told = progress or (lambda done, total: None)
        images = self.encode_pixels(pairs.pixels, lambda done, _: told(done, total))
        texts = self.encode_text(captions, lambda done, _: told(len(pairs) + done, total))
        return images, texts[which], owner

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts) if parts else np.zeros((0, self.embedding), dtype=np.float32)


class Embedder(Encoder):
    """A model in torch."""

    def __init__(self, model: CLIP, tokenizer: Tokenizer, device: Device) -> None:
        super().__init__(View.of(model.shape), tokenizer, model.shape.context, model.shape.embedding)
        self.model, self.device = model, device

    @torch.inference_mode()
    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(pixels_BSSC).to(self.device.torch)
        return self.model.encode_image(normalise(pixels, self.model.shape)).cpu().numpy()

    @torch.inference_mode()
    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        return self.model.encode_text(torch.from_numpy(tokens_BL).to(self.device.torch)).cpu().numpy()

    def description(self) -> dict:
        """What config.json holds: everything but the weights."""
        towers = {name: spec.to_dict() for name, spec in self.model.networks().items()}
        saved = {"format": 1, "model": asdict(self.model.shape), "tokenizer": self.tokenizer.to_dict()}
        return {**saved, "towers": towers} if towers else saved


def distinct_captions(pairs: Pairs) -> tuple[list[str], list[int], np.ndarray]:
    """The different captions, which of them each caption is, and each caption's image.

    Equal captions once: it is less work, and they are to score the same to the last bit, so that they tie.
    """
    every = [caption for captions in pairs.captions for caption in captions]
    rows = {caption: at for at, caption in enumerate(dict.fromkeys(every))}
    owner = np.repeat(np.arange(len(pairs)), [len(captions) for captions in pairs.captions])
    return list(rows), [rows[caption] for caption in every], owner


def load(path: str | os.PathLike, device: str = "cpu") -> Embedder:
    """The model in a run's folder, in a model folder, in a file of published weights, or of that name on the hub."""
    shape, tensors, tokenizer, towers = read_model(path)
    networks = {tower: (build_network(spec), spec) for tower, spec in towers.items()}
    # No first values: the saved ones take their place. A foreign network has to run once to be known.
    with torch.device("cpu" if networks else "meta"):
        model = CLIP(shape, networks=networks)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise RunError(f"The model in {path} cannot be loaded: {error}.", hint="lapclip train") from None
    place = choose_device(device)[0]
    if place.is_cpu:
        keep_freed_memory()  # large convolutions run at up to three times the speed
    return Embedder(model.to(place.torch).eval(), tokenizer, place)

"""Held-out pairs that are scored again and again, from the cached features of frozen towers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lapclip.data.dataset import Pairs
from lapclip.data.ragged import Ragged
from lapclip.embedder import Embedder, distinct_captions
from lapclip.progress import Progress


@dataclass(frozen=True)
class HeldOutFeatures:
    """Features of the held-out pairs. None for a tower that is not cached."""

    pairs: Pairs
    images: np.ndarray | None
    captions: Ragged | None
    """Features of the distinct captions."""


class FeatureEmbedder(Embedder):
    """An embedder that computes embeddings of the held-out pairs from their cached features."""

    def __init__(
        self, embedder: Embedder, features: HeldOutFeatures, boundaries: dict[str, int]
    ) -> None:
        super().__init__(embedder.model, embedder.tokenizer, embedder.device)
        self.batch = embedder.batch
        self._features = features
        self._boundaries = boundaries

    def encode_pairs(
        self, pairs: Pairs, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if pairs is not self._features.pairs:
            return super().encode_pairs(pairs, progress)
        captions, which, owner = distinct_captions(pairs)
        images = self._encode_images(pairs)
        texts = self._encode_captions(captions)
        return images, texts[which], owner

    @torch.inference_mode()
    def _encode_images(self, pairs: Pairs) -> np.ndarray:
        cached = self._features.images
        if cached is None:
            return self.encode_pixels(pairs.pixels)
        blocks = []
        for rows in slices(len(cached), self.batch):
            features = torch.from_numpy(np.array(cached[rows])).to(self.device.torch)
            embeddings = self.model.finish_image(features, self._boundaries["image"])
            blocks.append(embeddings.cpu().numpy())
        return np.concatenate(blocks)

    @torch.inference_mode()
    def _encode_captions(self, captions: Sequence[str]) -> np.ndarray:
        cached = self._features.captions
        if cached is None:
            return self.encode_text(captions)
        blocks = []
        for rows in slices(len(captions), self.batch):
            tokens_BL = self.tokenizer.batch(captions[rows], self.model.shape.context)
            padded = cached.padded(np.arange(rows.start, rows.stop), tokens_BL.shape[1])
            features = torch.from_numpy(padded).to(self.device.torch)
            tokens = torch.from_numpy(tokens_BL).to(self.device.torch)
            embeddings = self.model.finish_text(features, tokens, self._boundaries["text"])
            blocks.append(embeddings.cpu().numpy())
        return np.concatenate(blocks)


def slices(count: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` that cover `count` rows."""
    for first in range(0, count, size):
        yield slice(first, min(count, first + size))

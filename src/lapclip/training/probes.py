"""Probe captions: how the answers to a few fixed captions change while a model learns, for people who watch it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapclip.data.dataset import Pairs
from lapclip.embedder import Embedder
from lapclip.paths import write_atomic

CAPTIONS = 6
TOP = 5
SIDE = 96
"""Pixels of a thumbnail's longer side."""


class ProbeCaptions:
    """A few held-out captions, spread over the split, and the user's own."""

    def __init__(self, pairs: Pairs, own: Sequence[str], folder: Path) -> None:
        self._pairs, self._own, self._folder = pairs, own, folder
        firsts = np.cumsum([0, *(len(captions) for captions in pairs.captions)])[:-1]
        self._images = np.unique(
            np.linspace(0, len(pairs) - 1, min(CAPTIONS, len(pairs))).round().astype(int)
        )
        self._rows = firsts[self._images]

    def answers(
        self, embedder: Embedder, images: np.ndarray, texts: np.ndarray
    ) -> list[dict[str, Any]]:
        """What the model answers now, given its embeddings of the whole split; makes the thumbnails it names."""
        found = []
        for image, row in zip(self._images, self._rows, strict=True):
            scores = images @ texts[row]
            caption, right = self._pairs.captions[int(image)][0], int(image)
            rank = 1 + int((scores > scores[right]).sum())
            found.append(
                {
                    "caption": caption,
                    "own": False,
                    "right": right,
                    "rank": rank,
                    "top": _top(scores),
                }
            )
        if self._own:
            for caption, text in zip(self._own, embedder.encode_text(self._own), strict=True):
                found.append(
                    {
                        "caption": caption,
                        "own": True,
                        "right": None,
                        "rank": None,
                        "top": _top(images @ text),
                    }
                )
        for image in {entry["picture"] for answer in found for entry in answer["top"]} | {
            *map(int, self._images)
        }:
            self._save_thumbnail(image)
        return found

    def _save_thumbnail(self, image: int) -> None:
        path = self._folder / f"{image}.png"
        if path.exists():
            return
        thumbnail = Image.fromarray(np.asarray(self._pairs.pixels[image]))
        thumbnail.thumbnail((SIDE, SIDE))
        with suppress(OSError):  # a full disk costs a thumbnail, not the run
            self._folder.mkdir(0o700, exist_ok=True)  # small copies of what may be private photos
            write_atomic(path, lambda partial: thumbnail.save(partial, format="PNG"))


def own_captions(ask: str) -> list[str]:
    """The user's captions, as the setting `work.ask` holds them."""
    return [caption.strip() for caption in ask.split("|") if caption.strip()]


def _top(scores: np.ndarray) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")[:TOP]
    return [{"picture": int(at), "score": round(float(scores[at]), 4)} for at in order]

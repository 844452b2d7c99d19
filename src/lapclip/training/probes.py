"""Probe captions: a few fixed captions whose answers show, while a model trains, what it has
learned."""

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

HELD_OUT_CAPTIONS = 6
TOP_IMAGES = 5
THUMBNAIL_SIDE = 96  # pixels, the longer side


class ProbeCaptions:
    """A few captions spread over the held-out pairs, and the user's own."""

    def __init__(self, pairs: Pairs, own: Sequence[str], folder: Path) -> None:
        self._pairs, self._own, self._folder = pairs, own, folder
        caption_counts = [len(captions) for captions in pairs.captions]
        first_captions = np.cumsum([0, *caption_counts])[:-1]
        count = min(HELD_OUT_CAPTIONS, len(pairs))
        images = np.linspace(0, len(pairs) - 1, count).round().astype(int)
        self._images = np.unique(images)
        self._texts = first_captions[self._images]

    def answers(
        self, embedder: Embedder, images: np.ndarray, texts: np.ndarray
    ) -> list[dict[str, Any]]:
        """Return the best images for each caption, and save their thumbnails.

        `images` and `texts` are the embeddings of all held-out pairs.
        """
        answers = []
        for image, text in zip(self._images.tolist(), self._texts.tolist(), strict=True):
            caption = self._pairs.captions[int(image)][0]
            answers.append(_answer(caption, images @ texts[text], image))
        if self._own:
            for caption, text in zip(self._own, embedder.encode_text(self._own), strict=True):
                answers.append(_answer(caption, images @ text, None))
        shown = set(self._images.tolist())
        for answer in answers:
            shown |= {entry["picture"] for entry in answer["top"]}
        for image in shown:
            self._save_thumbnail(image)
        return answers

    def _save_thumbnail(self, image: int) -> None:
        path = self._folder / f"{image}.png"
        if path.exists():
            return
        thumbnail = Image.fromarray(np.asarray(self._pairs.pixels[image]))
        thumbnail.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        with suppress(OSError):  # a full disk must not end the run
            self._folder.mkdir(0o700, exist_ok=True)  # the images may be private photos
            write_atomic(path, lambda partial: thumbnail.save(partial, format="PNG"))


def _answer(caption: str, scores: np.ndarray, right: int | None) -> dict[str, Any]:
    """Return the best images for a caption, as they are stored in an event.

    `right` is the image that the caption belongs to. None for the user's captions.
    """
    rank = None
    if right is not None:
        rank = 1 + int((scores > scores[right]).sum())
    best = np.argsort(-scores, kind="stable")[:TOP_IMAGES]
    top = [{"picture": int(image), "score": round(float(scores[image]), 4)} for image in best]
    return {"caption": caption, "own": right is None, "right": right, "rank": rank, "top": top}


def own_captions(ask: str) -> list[str]:
    """Return the captions in the setting `work.ask`, which separates them by bars."""
    captions = [caption.strip() for caption in ask.split("|")]
    return [caption for caption in captions if caption]

"""A floor for scores on drawn images: what a linear model without any learning of shapes can do."""

from __future__ import annotations

import re

import numpy as np

from lapclip.data.dataset import Pairs

THUMBNAIL = 8


def linear_baseline(train: Pairs, held_out: Pairs, ridge: float = 1.0) -> float:
    """Text-to-image R@1 of ridge regression from the words of a caption to an 8x8 thumbnail, ranked by distance."""
    captions = [options[0] for options in train.captions]
    index = {word: column for column, word in enumerate(sorted({word for text in captions for word in _words(text)}))}
    words = _bags(captions, index)
    thumbnails = _thumbnails(train.pixels[:])
    weights = np.linalg.solve(words.T @ words + ridge * np.eye(words.shape[1]), words.T @ thumbnails)
    guesses = _bags([captions[0] for captions in held_out.captions], index) @ weights
    candidates = _thumbnails(held_out.pixels[:])
    nearest = [((candidates - guess) ** 2).sum(axis=1).argmin() for guess in guesses]
    return float(np.mean(nearest == np.arange(len(held_out))))


def _words(caption: str) -> list[str]:
    return re.findall(r"[a-z-]+", caption)


def _bags(captions: list[str], index: dict[str, int]) -> np.ndarray:
    bags = np.zeros((len(captions), len(index) + 1))
    bags[:, -1] = 1  # the intercept
    for row, caption in enumerate(captions):
        for word in _words(caption):
            if word in index:
                bags[row, index[word]] += 1
    return bags


def _thumbnails(pixels: np.ndarray) -> np.ndarray:
    side = pixels.shape[1] // THUMBNAIL
    images = (image[: side * THUMBNAIL, : side * THUMBNAIL] for image in pixels)
    blocks = (image.reshape(THUMBNAIL, side, THUMBNAIL, side, 3).mean(axis=(1, 3)) for image in images)
    return np.stack([block.reshape(-1) / 255 for block in blocks])

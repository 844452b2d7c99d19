"""Embeddings for tests of evaluation, as plain as they come."""

from __future__ import annotations

import numpy as np


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def noisy_pairs(
    count: int, noise: float, captions_each: int = 1, seed: int = 0, width: int = 16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images anywhere, and captions near theirs."""
    draw = np.random.default_rng(seed)
    images = unit(draw.normal(size=(count, width)))
    owner = np.repeat(np.arange(count), captions_each)
    return images, unit(images[owner] + noise * draw.normal(size=(len(owner), width))), owner

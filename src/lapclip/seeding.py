"""Every random draw is seeded by (seed, purpose, index), so that a resumed run draws what the first one would have.

A saved generator state would not do: batches are prepared ahead of the step that uses them.
"""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A fresh generator for one purpose at one step or epoch."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), index])


def derived_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A 63-bit seed for generators of other libraries."""
    return int(generator(seed, purpose, index).integers(2**63))

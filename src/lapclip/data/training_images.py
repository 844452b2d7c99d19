"""Which images a run learns from, saved with it, so that an evaluation knows which ones are no test."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

SEEN = "seen.npy"


def save_seen(identities: np.ndarray | None, path: Path, start: str = "") -> None:
    """Save the identities of training images, and of those that the model to start from had seen; nothing where they
    are drawn."""
    earlier = _read(seen_by(start))
    if identities is not None or earlier is not None:
        every = [part for part in (identities, earlier) if part is not None]
        with suppress(OSError), open(path, "wb") as file:  # a full disk costs a warning later, not the run
            np.save(file, np.unique(np.concatenate(every)))


def seen_by(model: str) -> Path:
    """Where a run, or the run whose model it is, saves what it learnt from; not there for other models."""
    path = Path(model)
    return path / SEEN if (path / SEEN).exists() else path.parent / SEEN


def count_seen(identities: np.ndarray | None, path: Path) -> int | None:
    """How many of some images a run learnt from; None where that is not known."""
    seen = _read(path)
    return None if identities is None or seen is None else int(np.isin(identities, seen).sum())


def _read(path: Path) -> np.ndarray | None:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        return None

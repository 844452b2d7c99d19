"""Which pictures a run learns from, kept with it, so that an evaluation knows which ones are no test."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np


def save_seen(identities: np.ndarray | None, path: Path) -> None:
    """Keep the identities of training pictures; nothing where they are drawn."""
    if identities is not None:
        with suppress(OSError), open(path, "wb") as file:  # a full disk costs a warning later, not the run
            np.save(file, np.unique(identities))


def count_seen(identities: np.ndarray | None, path: Path) -> int | None:
    """How many of some pictures a run learnt from; None where that is not known."""
    if identities is None:
        return None
    try:
        return int(np.isin(identities, np.load(path)).sum())
    except (OSError, ValueError, EOFError):
        return None

"""Names of files as text that is safe to show."""

from __future__ import annotations

import os
from pathlib import Path


def shown(path: str | os.PathLike) -> str:
    """A path on one line: line ends, control characters and halves of characters become question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(path))


def from_here(path: Path) -> str:
    """A path as it can be typed here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)

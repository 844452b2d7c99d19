"""Folders that `lapclip export` writes for other engines than torch: known by their description."""

from __future__ import annotations

from pathlib import Path

DESCRIPTION = "lapclip.json"


def is_exported(folder: Path) -> bool:
    """Whether a folder holds towers for ONNX Runtime or Core ML."""
    return (folder / DESCRIPTION).is_file()

"""Asking the system: commands and small files, either of which may be missing or forbidden."""

from __future__ import annotations

import subprocess
from pathlib import Path


def output_of(*command: str, seconds: float = 5.0) -> str | None:
    """What a command prints, or None where it is missing, fails without output or takes too long.

    A command that prints and then fails still counts: macOS' sysctl does so when one of several names is unknown.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace") or None


def text_of(path: Path) -> str | None:
    """A small file's text without its last line break, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number_in(path: Path) -> int | None:
    """The whole number a small file holds, or None."""
    try:
        return int(text_of(path) or "")
    except ValueError:
        return None

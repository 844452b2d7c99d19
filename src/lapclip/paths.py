"""Folders, files that are written whole or not at all, and digests of what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

if sys.platform == "darwin":
    import fcntl


def cache_folder() -> Path:
    """Where things that can be made again lie: LAPCLIP_CACHE, or the system's folder for caches."""
    return _chosen_folder("CACHE") or platformdirs.user_cache_path("lapclip", appauthor=False)


def data_folder() -> Path:
    """Where things lie that take long to make again: LAPCLIP_DATA, or the system's folder for a program's data."""
    below = "data" if sys.platform == "win32" else ""  # where caches lie in the same folder
    return _chosen_folder("DATA") or platformdirs.user_data_path("lapclip", appauthor=False) / below


def _chosen_folder(kind: str) -> Path | None:
    """What the environment asks for. XDG's variables count on every system."""
    if chosen := os.environ.get(f"LAPCLIP_{kind}"):
        return Path(chosen)
    home = os.environ.get(f"XDG_{kind}_HOME")
    return Path(home) / "lapclip" if home else None


def write_atomic(path: Path, content: str | bytes | Callable[[Path], Any], *, durable: bool = False) -> None:
    """Write a file so that readers, and whoever comes after a crash, find it whole: as it was, or as it is to be.

    Content is text, bytes, or a function that writes to the path it is given. With `durable`, it is on disk before
    this returns. What fails raises OSError and leaves nothing behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8", newline="\n")
        elif isinstance(content, bytes):
            partial.write_bytes(content)
        else:
            content(partial)
        if durable:
            flush(partial)
        replace(partial, path)
        if durable:
            flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """Rename over the target, retrying while another program (a virus scanner, an indexer) holds it on Windows."""
    for wait in (0.05, 0.1, 0.2, 0.4, 0.8, None):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or wait is None:
                raise
            time.sleep(wait)


def flush(path: Path) -> None:
    """Make the system write a file, or the names in a folder, to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder, and keeps renames in order by itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        if sys.platform == "darwin":  # fsync there leaves data in the drive's own cache
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_bytes(data: bytes) -> str:
    """SHA-256 as 64 hexadecimal digits; twice as fast as others where processors know it, as most do."""
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_json(content: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return digest_of_bytes(json.dumps(content, sort_keys=True).encode())

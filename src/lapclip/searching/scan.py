"""Which image files lie under a folder, and when each was last changed. Nothing is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lapclip.data.find_images import is_image, walk_folders
from lapclip.errors import DataError

LEFT_OUT = ("@eaDir", "$RECYCLE.BIN", "__MACOSX")
"""Folders in which other programs keep previews and what was thrown away."""
LIBRARIES = (".photoslibrary", ".aplibrary", ".lrdata")
"""How folders end in which programs for photos keep originals and previews side by side, under names of their own."""
RUN_FILES = ("run.toml", "events.jsonl")
"""What tells a run's folder: the small images in it are lapclip's, not the user's."""
LATEST = 2**63 - 1
"""The largest number that SQLite holds: nanoseconds until the year 2262."""


class Stamp(NamedTuple):
    """What changes when a file does."""

    bytes: int
    modified: int
    """Nanoseconds."""

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Times that SQLite cannot hold, which a few damaged files have, become the nearest that can."""
        return cls(status.st_size, max(-LATEST, min(status.st_mtime_ns, LATEST)))


class Scan:
    """The images under a folder, by their path in it, in the order of their names. Links are followed, each real folder
    once. Hidden files and folders, run folders, and those of `LEFT_OUT` are left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closed: list[str] = []
        """Folders that could not be looked into, as far as the scan has come."""

    def hides(self, path: str) -> bool:
        """Whether a path may still be there, in a folder that could not be looked into."""
        return any(path.startswith(folder + os.sep) for folder in self.closed)

    def __iter__(self) -> Iterator[tuple[str, Stamp]]:
        seen: set[tuple[int, int | str]] = set()

        def cannot_list(inside: str, error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # a folder that has just gone, or a link to nowhere
                self.closed.append(inside)

        for inside, entries, below in walk_folders(self.folder, cannot_list):
            here = self.folder / inside
            try:
                found = os.stat(here)
            except OSError:  # gone since
                continue
            # Some file systems number no folders; there the real path tells them apart.
            real = (found.st_dev, found.st_ino) if found.st_ino else (0, os.path.realpath(here))
            if real in seen or (inside and {entry.name for entry in entries}.issuperset(RUN_FILES)):
                continue
            seen.add(real)
            for entry in entries:
                if entry.name in LEFT_OUT or entry.name.lower().endswith(LIBRARIES):
                    continue
                path = os.path.join(inside, entry.name)
                try:
                    if entry.is_dir():
                        below.append(path)
                    elif is_image(entry.name):
                        status = os.stat(here / entry.name)
                        if stat.S_ISREG(status.st_mode):  # never a pipe, which would be waited for
                            yield path, Stamp.of(status)
                except OSError:  # gone since, or a link that leads nowhere or to itself
                    continue
        if "" in self.closed:
            raise DataError(f"{self.folder} cannot be looked into.", hint="a folder that you may read")

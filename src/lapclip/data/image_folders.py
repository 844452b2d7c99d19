"""Which files lie under a folder, and which of them are images by their names. Nothing is opened.

Training data and the folders of `lapclip search` are walked alike, one folder after the other in the order of names;
they differ in what is left out and in which links are followed.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from lapclip.data.table import Skipped

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jfif", ".heic", ".heif", ".avif")
LINK_OUTSIDE = "a link that leads out of the data's folder"
LINK_TO_FOLDER = "a link to a folder"
NOT_PLAIN = "not a plain file"


def is_image(name: str) -> bool:
    """Whether a file's name ends as those of images do."""
    return name.lower().endswith(ENDINGS)


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it; both as `os.path.realpath` gives them."""
    return path == folder or path.startswith(folder if folder.endswith(os.sep) else folder + os.sep)


def plain_file(path: Path) -> bool:
    """Whether a path is a file that can be read to its end: no device, no pipe."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def walk_folders(
    top: str | Path, cannot_list: Callable[[str, OSError], None]
) -> Iterator[tuple[str, list[os.DirEntry[str]], list[str]]]:
    """Folders from the top down: the path of each below the top, what it holds in the order of names without what is
    hidden, and an empty list to which the caller adds the folders to walk next.

    From a list, because folders may lie deeper than calls can. One that cannot be listed is reported and left out.
    """
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(top, folder)) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            cannot_list(folder, error)
            continue
        below: list[str] = []
        yield folder, [entry for entry in entries if not entry.name.startswith(".")], below
        waiting += reversed(below)


def walk(root: Path, skipped: list[Skipped]) -> Iterator[str]:
    """The paths of all files below a folder of training data, sorted. Hidden ones are left out; links that lead out
    of it, and links to folders, are named in `skipped`."""
    top = os.path.realpath(root)

    def cannot_list(folder: str, error: OSError) -> None:
        skipped.append(Skipped(folder or str(root), f"cannot be listed: {error.strerror or error}"))

    for folder, entries, below in walk_folders(top, cannot_list):
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            if entry.name == "__MACOSX":
                continue
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                if not is_inside(real, top):
                    skipped.append(Skipped(path, LINK_OUTSIDE))
                elif os.path.isfile(real):
                    yield path
                else:
                    skipped.append(Skipped(path, LINK_TO_FOLDER))
            elif entry.is_dir(follow_symlinks=False):
                # Windows has links to folders that do not say they are: junctions.
                real = os.path.realpath(entry.path)
                if _same(real, os.path.join(top, path)):
                    below.append(path)
                else:
                    skipped.append(Skipped(path, LINK_TO_FOLDER if is_inside(real, top) else LINK_OUTSIDE))
            elif entry.is_file(follow_symlinks=False):
                yield path
            else:
                skipped.append(Skipped(path, NOT_PLAIN))


def _same(path: str, other: str) -> bool:
    return os.path.normcase(os.path.normpath(path)) == os.path.normcase(os.path.normpath(other))

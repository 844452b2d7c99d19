"""Image files: which lie under a folder, and which ones the names in a table mean. Nothing is opened.

Training data and the folders of `lapclip search` are walked alike, one folder after the other in the order of names;
they differ in what is left out and in which links are followed.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lapclip.config import DataConfig
from lapclip.data.table import ImageFile, Skipped
from lapclip.errors import DataError

ENDINGS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".jfif",
    ".heic",
    ".heif",
    ".avif",
)
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
                    skipped.append(
                        Skipped(path, LINK_TO_FOLDER if is_inside(real, top) else LINK_OUTSIDE)
                    )
            elif entry.is_file(follow_symlinks=False):
                yield path
            else:
                skipped.append(Skipped(path, NOT_PLAIN))


def _same(path: str, other: str) -> bool:
    return os.path.normcase(os.path.normpath(path)) == os.path.normcase(os.path.normpath(other))


MISSING = "there is no such image"
OUTSIDE = "the name leads out of the data's folder"
_ABSOLUTE = re.compile(r"[A-Za-z]:|[\\/]")
_NUMBERED = re.compile(r"#\d+$")
_ASIDE = ("annotations", "captions", "labels", "lists", "splits", "text", "texts")
"""Folders that hold tables beside the folder of the images, not above it."""


class ImageFinder:
    """Finds images by name: relative to `base`, never outside `root`."""

    def __init__(self, base: Path, root: Path | None = None) -> None:
        self.base, self.root = base, os.path.realpath(root or base)
        self._prefix = Path(os.path.relpath(os.path.realpath(base), self.root)).as_posix()
        self._found: dict[str, ImageFile | str] = {}
        self._listed: dict[str, dict[str, str] | str] = {}
        self._alike: dict[str, dict[str, str]] = {}

    def find(self, name: str) -> ImageFile | str:
        """The image of that name, or why there is none."""
        found = self._found.get(name)
        if found is None:
            found = self._find(name)
            if (
                isinstance(found, str) and name != name.strip()
            ):  # spaces may be the table's, or a part of the name
                found = self._find(name.strip())
            self._found[name] = found
        return found

    def _find(self, name: str) -> ImageFile | str:
        if not name:
            return "no image is named"
        if "\0" in name:
            return "the image's name has a NUL character"
        if "://" in name[:12]:
            return "an address on the web, not a file: download it first"
        why = MISSING
        for option in dict.fromkeys((name, name.replace("\\", "/"), _NUMBERED.sub("", name))):
            found = self._find_listed(option)
            if isinstance(found, ImageFile):
                return found
            if found != MISSING:
                why = found
        return why

    def _find_listed(self, name: str) -> ImageFile | str:
        relative = self._relative(name)
        if relative is None:
            return OUTSIDE
        folder, leaf = posixpath.split(relative)
        listed = self._list(folder)
        if isinstance(listed, str):
            return listed
        if leaf not in listed:
            leaf = self._similar(folder, listed, leaf)
        kind = listed.get(leaf)
        if kind == "file":
            relative = posixpath.join(folder, leaf)
            return ImageFile(Path(self.root, relative), relative)
        if kind == "link":
            relative = posixpath.join(folder, leaf)
            real = os.path.realpath(os.path.join(self.root, relative))
            if not is_inside(real, self.root):
                return LINK_OUTSIDE
            return (
                ImageFile(Path(self.root, relative), relative)
                if os.path.isfile(real)
                else NOT_PLAIN
            )
        return NOT_PLAIN if kind else MISSING

    def _relative(self, name: str) -> str | None:
        """The path below the root that a name means; None where it leads out of it."""
        if _ABSOLUTE.match(name):
            whole = os.path.normpath(name)
            for top in (self.root, os.path.abspath(self.base)):
                if is_inside(whole, top):
                    below = Path(os.path.relpath(whole, top)).as_posix()
                    return (
                        below
                        if top == self.root
                        else posixpath.normpath(posixpath.join(self._prefix, below))
                    )
            return None
        relative = posixpath.normpath(posixpath.join(self._prefix, name))
        return None if relative == ".." or relative.startswith("../") else relative

    def _list(self, folder: str) -> dict[str, str] | str:
        """What a folder holds, by name: a file, a link or something else. Listed once, not for each name."""
        listed = self._listed.get(folder)
        if listed is None:
            path = os.path.join(self.root, folder)
            try:
                if is_inside(os.path.realpath(path), self.root):
                    with os.scandir(path) as entries:
                        listed = {entry.name: _kind(entry) for entry in entries}
                else:
                    listed = LINK_OUTSIDE
            except (OSError, ValueError):
                listed = MISSING
            self._listed[folder] = listed
        return listed

    def _similar(self, folder: str, listed: dict[str, str], leaf: str) -> str:
        """The name as the file system spells it: other case, composed accents, or an ending that the table omits."""
        alike = self._alike.get(folder)
        if alike is None:
            alike = self._alike[folder] = {}
            for name in listed:
                key = _folded(name)
                # Two files that differ in case only are told apart by their exact names alone.
                alike[key] = "" if key in alike else name
        key = _folded(leaf)
        if is_image(leaf):
            return alike.get(key, "")
        return next((found for ending in ("", *ENDINGS) if (found := alike.get(key + ending))), "")


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _folded(name: str) -> str:
    return (name if name.isascii() else unicodedata.normalize("NFC", name)).casefold()


def candidate_folders(table: Path, root: Path, config: DataConfig) -> list[ImageFinder]:
    """The folders that the names in a table may be relative to, the likeliest first."""
    if config.pictures:
        asked = Path(config.pictures).expanduser()
        chosen = next((path for path in (asked, root / asked) if path.is_dir()), None)
        if chosen is None:
            raise DataError(f"data.pictures: there is no folder {config.pictures}.")
        return [ImageFinder(chosen)]
    beside = table.parent
    tops = [beside]
    if beside.name.lower() in _ASIDE and os.path.realpath(beside) == os.path.realpath(root):
        root = beside.parent  # the table alone was named, and its images lie beside its folder
    if beside.name.lower() in _ASIDE:
        tops.append(beside.parent)
    below = [folder for top in tops for folder in _subfolders(top)]
    deeper = [folder for top in below if len(below) <= 8 for folder in _subfolders(top)]
    return [ImageFinder(base, root) for base in (*tops, *below[:64], *deeper[:64])]


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
            ]
    except OSError:
        return []
    # Folders that say they hold images come first.
    return [
        folder / name for name in sorted(names, key=lambda name: ("im" not in name.lower(), name))
    ]


def best_folder(options: Sequence[ImageFinder], names: Iterable[str]) -> tuple[ImageFinder, int]:
    """The folder that has most of these images, and how many it has."""
    names = list(names)
    best, most = options[0], -1
    for folder in options:
        count = sum(isinstance(folder.find(name), ImageFile) for name in names)
        if count > most:
            best, most = folder, count
        if count == len(names):
            break
    return best, most


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
            if not isinstance(
                error, FileNotFoundError
            ):  # a folder that has just gone, or a link to nowhere
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
            raise DataError(
                f"{self.folder} cannot be looked into.", hint="a folder that you may read"
            )

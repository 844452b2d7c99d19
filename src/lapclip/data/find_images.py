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
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from lapclip.config import DataConfig
from lapclip.data.table import ImageFile, Skipped
from lapclip.errors import DataError

ENDINGS = (
    ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jfif", ".heic", ".heif", ".avif",
)  # fmt: skip
_CAMERA_NAME = re.compile(r"[A-Za-z]{1,4}[-_]?\d{4,}")  # IMG_0001, DSC00012, P1010001
LINK_OUTSIDE = "a link that leads out of the data's folder"
LINK_TO_FOLDER = "a link to a folder"
NOT_PLAIN = "not a plain file"


def is_image(name: str) -> bool:
    """Return whether a file's name ends as those of images do."""
    return name.lower().endswith(ENDINGS)


def is_file_name(caption: str) -> bool:
    """Return whether a caption is nothing but the name of an image file."""
    return is_image(caption) or _CAMERA_NAME.fullmatch(caption) is not None


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is a folder or lies in it. Both are as `os.path.realpath` returns them."""
    return path == folder or path.startswith(folder if folder.endswith(os.sep) else folder + os.sep)


def plain_file(path: Path) -> bool:
    """Return whether a path is a file that can be read to its end: no device, no pipe."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def walk_folders(
    top: str | Path, cannot_list: Callable[[str, OSError], None]
) -> Iterator[tuple[str, list[os.DirEntry[str]], list[str]]]:
    """Walk folders from the top down, without hidden files and folders.

    Yields the path of each folder below the top, what it holds in the order of names, and an empty list to which the
    caller adds the folders to walk next. A folder that cannot be listed is reported and left out.
    """
    pending = [""]  # a list, because folders may lie deeper than calls can
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(os.path.join(top, folder)) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            cannot_list(folder, error)
            continue
        below: list[str] = []
        yield folder, [entry for entry in entries if not entry.name.startswith(".")], below
        pending += reversed(below)


def walk(root: Path, skipped: list[Skipped]) -> Iterator[str]:
    """Yield the paths of all files below a folder of training data, sorted.

    Hidden files are left out. Links that lead out of the folder, and links to folders, are added to `skipped`.
    """
    top = os.path.realpath(root)

    def cannot_list(folder: str, error: OSError) -> None:
        skipped.append(Skipped(folder or str(root), f"cannot be listed: {error.strerror or error}"))

    for folder, entries, below in walk_folders(top, cannot_list):
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            if entry.name == "__MACOSX":
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.is_file(follow_symlinks=False):
                yield path
            elif not is_folder and not entry.is_symlink():
                skipped.append(Skipped(path, NOT_PLAIN))
            else:
                real = os.path.realpath(entry.path)
                if is_folder and _same(real, os.path.join(top, path)):
                    below.append(path)
                elif not is_inside(real, top):
                    skipped.append(Skipped(path, LINK_OUTSIDE))
                elif not is_folder and os.path.isfile(real):
                    yield path
                else:  # also a junction of Windows, which does not say that it is a link
                    skipped.append(Skipped(path, LINK_TO_FOLDER))


def _same(path: str, other: str) -> bool:
    return os.path.normcase(os.path.normpath(path)) == os.path.normcase(os.path.normpath(other))


MISSING = "there is no such image"
OUTSIDE = "the name leads out of the data's folder"
# Folders that hold tables beside the folder of the images, not above it.
TABLE_FOLDERS = ("annotations", "captions", "labels", "lists", "splits", "text", "texts")
MAX_FOLDERS = 64  # at each depth, in which images are looked for
MAX_DEEP_FOLDERS = (
    8  # folders beside a table, up to which the folders in them are looked into as well
)
_ABSOLUTE = re.compile(r"[A-Za-z]:|[\\/]")
_CAPTION_NUMBER = re.compile(r"#\d+$")  # in Flickr8k, a.jpg#0 is the first caption of a.jpg


class ImageFinder:
    """Finds images by their names in a table: relative to `base`, never outside `root`."""

    def __init__(self, base: Path, root: Path | None = None) -> None:
        self.base, self.root = base, os.path.realpath(root or base)
        self._prefix = Path(os.path.relpath(os.path.realpath(base), self.root)).as_posix()
        self._matches: dict[str, ImageFile | str] = {}
        self._listings: dict[str, dict[str, str] | str] = {}
        self._spellings: dict[str, dict[str, str]] = {}

    def find(self, name: str) -> ImageFile | str:
        """Return the image of that name, or why there is none."""
        if name not in self._matches:
            match = self._find(name)
            if (
                isinstance(match, str) and name != name.strip()
            ):  # spaces may be the table's, or part of the name
                match = self._find(name.strip())
            self._matches[name] = match
        return self._matches[name]

    def _find(self, name: str) -> ImageFile | str:
        if not name:
            return "no image is named"
        if "\0" in name:
            return "the image's name has a NUL character"
        if "://" in name[:12]:
            return "an address on the web, not a file: download it first"
        why = MISSING
        for option in dict.fromkeys((name, name.replace("\\", "/"), _CAPTION_NUMBER.sub("", name))):
            match = self._find_listed(option)
            if isinstance(match, ImageFile):
                return match
            if match != MISSING:
                why = match
        return why

    def _find_listed(self, name: str) -> ImageFile | str:
        relative = self._relative(name)
        if relative is None:
            return OUTSIDE
        folder, leaf = posixpath.split(relative)
        listing = self._list(folder)
        if isinstance(listing, str):
            return listing
        if leaf not in listing:
            leaf = self._spelling(folder, listing, leaf)
        kind = listing.get(leaf)
        if kind is None:
            return MISSING
        relative = posixpath.join(folder, leaf)
        if kind == "link":
            real = os.path.realpath(os.path.join(self.root, relative))
            if not is_inside(real, self.root):
                return LINK_OUTSIDE
            kind = "file" if os.path.isfile(real) else "other"
        if kind == "other":
            return NOT_PLAIN
        return ImageFile(Path(self.root, relative), relative)

    def _relative(self, name: str) -> str | None:
        """Return the path below the root that a name means. None if it leads out of it."""
        below = name
        if _ABSOLUTE.match(name):
            path = os.path.normpath(name)
            if is_inside(path, self.root):
                return Path(os.path.relpath(path, self.root)).as_posix()
            base = os.path.abspath(self.base)
            if not is_inside(path, base):
                return None
            below = Path(os.path.relpath(path, base)).as_posix()
        relative = posixpath.normpath(posixpath.join(self._prefix, below))
        return None if relative == ".." or relative.startswith("../") else relative

    def _list(self, folder: str) -> dict[str, str] | str:
        """Return the kind of each file in a folder, or why it cannot be listed. Each folder is listed once."""
        if folder not in self._listings:
            self._listings[folder] = self._scan(os.path.join(self.root, folder))
        return self._listings[folder]

    def _scan(self, path: str) -> dict[str, str] | str:
        kinds = {}
        try:
            if not is_inside(os.path.realpath(path), self.root):
                return LINK_OUTSIDE
            with os.scandir(path) as entries:
                for entry in entries:
                    kinds[entry.name] = "file" if entry.is_file(follow_symlinks=False) else "other"
                    if entry.is_symlink():
                        kinds[entry.name] = "link"
        except (OSError, ValueError):
            return MISSING
        return kinds

    def _spelling(self, folder: str, listing: dict[str, str], leaf: str) -> str:
        """Return a name as the file system spells it: in other case, with composed accents, or with an ending.

        Empty if no file or several files fit.
        """
        spellings = self._spellings.get(folder)
        if spellings is None:
            spellings = self._spellings[folder] = {}
            for name in listing:
                key = _folded(name)
                spellings[key] = "" if key in spellings else name
        key = _folded(leaf)
        endings = ("",) if is_image(leaf) else ("", *ENDINGS)
        for ending in endings:
            if spellings.get(key + ending):
                return spellings[key + ending]
        return ""


def _folded(name: str) -> str:
    """Return a name without differences of case and of how accents are composed."""
    return unicodedata.normalize("NFC", name).casefold()


def candidate_folders(table: Path, root: Path, config: DataConfig) -> list[ImageFinder]:
    """Return the folders that the names in a table may be relative to, the likeliest first."""
    if config.pictures:
        requested = Path(config.pictures).expanduser()
        for path in (requested, root / requested):
            if path.is_dir():
                return [ImageFinder(path)]
        raise DataError(f"data.pictures: there is no folder {config.pictures}.")
    folder = table.parent
    tops = [folder]
    if folder.name.lower() in TABLE_FOLDERS:
        tops.append(folder.parent)
        if os.path.realpath(folder) == os.path.realpath(root):  # the table itself was named
            root = folder.parent
    below = list(chain.from_iterable(map(_subfolders, tops)))
    folders = [*tops, *below[:MAX_FOLDERS]]
    if len(below) <= MAX_DEEP_FOLDERS:
        deeper = list(chain.from_iterable(map(_subfolders, below)))
        folders += deeper[:MAX_FOLDERS]
    return [ImageFinder(base, root) for base in folders]


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder. Those whose names say that they hold images come first."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []
    names = [name for name in names if not name.startswith(".")]
    names.sort(key=lambda name: ("im" not in name.lower(), name))
    return [folder / name for name in names]


def best_folder(folders: Sequence[ImageFinder], names: Iterable[str]) -> tuple[ImageFinder, int]:
    """Return the folder that has most of these images, and how many it has."""
    names = list(names)
    best, most = folders[0], -1
    for folder in folders:
        count = sum(isinstance(folder.find(name), ImageFile) for name in names)
        if count > most:
            best, most = folder, count
        if count == len(names):
            break
    return best, most


FOREIGN_FOLDERS = ("@eaDir", "$RECYCLE.BIN", "__MACOSX")  # previews and what was thrown away
# Endings of folders in which photo programs keep originals and previews side by side, under names of their own.
LIBRARIES = (".photoslibrary", ".aplibrary", ".lrdata")
RUN_FILES = (
    "run.toml",
    "events.jsonl",
)  # of a run's folder, whose small images are ours, not the user's
MAX_INTEGER = 2**63 - 1  # of SQLite: nanoseconds until the year 2262


class Stamp(NamedTuple):
    """Size and time of a file, which change when it does."""

    bytes: int
    modified: int
    """Nanoseconds."""

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a file. SQLite cannot hold some times that damaged files have, so they are limited."""
        return cls(status.st_size, max(-MAX_INTEGER, min(status.st_mtime_ns, MAX_INTEGER)))


class Scan:
    """The images under a folder, by their paths in it, in the order of names.

    Links are followed, each real folder once. Hidden files, run folders and folders of other programs are left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closed: list[str] = []
        """Folders that could not be listed so far."""

    def hides(self, path: str) -> bool:
        """Return whether a path may be there all the same, in a folder that could not be listed."""
        return any(path.startswith(folder + os.sep) for folder in self.closed)

    def __iter__(self) -> Iterator[tuple[str, Stamp]]:
        seen: set[tuple[int, int | str]] = set()

        def cannot_list(inside: str, error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                self.closed.append(inside)

        for inside, entries, below in walk_folders(self.folder, cannot_list):
            here = self.folder / inside
            try:
                status = os.stat(here)
            except OSError:  # removed since
                continue
            identity: tuple[int, int | str] = (status.st_dev, status.st_ino)
            if not status.st_ino:  # a file system without numbers of folders
                identity = (0, os.path.realpath(here))
            is_run = {entry.name for entry in entries}.issuperset(RUN_FILES)
            if identity in seen or (inside and is_run):
                continue
            seen.add(identity)
            for entry in entries:
                if entry.name in FOREIGN_FOLDERS or entry.name.lower().endswith(LIBRARIES):
                    continue
                path = os.path.join(inside, entry.name)
                try:
                    if entry.is_dir():
                        below.append(path)
                    elif is_image(entry.name):
                        status = os.stat(here / entry.name)
                        if stat.S_ISREG(status.st_mode):  # not a pipe, which would block
                            yield path, Stamp.of(status)
                except OSError:  # removed since, or a link to nowhere or to itself
                    continue
        if "" in self.closed:
            raise DataError(
                f"{self.folder} cannot be looked into.", hint="a folder that you may read"
            )

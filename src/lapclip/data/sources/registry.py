"""The registry of data sources.

Each file of this folder holds one source and registers it. A built-in source is known by its name: it says how its
images and captions are read, or drawn, and what to tell people about it. Everything else is files, in a format that is
recognised by the ending of a file or by the names in a folder; a format says how its files are read. Adding a source
or a format adds a file here and touches no other, unless folders are recognised by it: then it has a rank below.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lapclip.config import DataConfig
from lapclip.data.columns import NotATable
from lapclip.data.splits import split_named
from lapclip.data.table import RowCollector, Table, count_for_training

if TYPE_CHECKING:
    from lapclip.data.dataset import DataSet
    from lapclip.progress import DataProgress


class Source:
    """Where images and captions come from. Each source overrides what differs."""

    name: ClassVar[str] = ""
    """What `data.source` is for a built-in source; empty for files."""
    is_drawn: ClassVar[bool] = False
    """Whether its images are drawn at the size that a model sees, not read from files."""
    by_content: ClassVar[bool] = True
    """Whether splits may be drawn by content; else they are drawn by name, as they always were."""
    title: ClassVar[str] = ""
    """What people call it, to go on after a comma; empty where that is what `data.source` says."""
    outlook: ClassVar[str] = ""
    """What training on it from nothing can reach; empty where that depends on how many images there are."""

    def title_of(self, config: DataConfig) -> str:
        """A headline for the data: its title, or the name of its folder or file."""
        title = self.title[:1].upper() + self.title[1:]
        return title or Path(config.source).resolve().name or config.source

    def what_changed(self, config: DataConfig) -> str:
        """Why a run cannot go on where the data is not what it began with."""
        return f"images, captions or splits in {config.source} have changed"

    def read_table(self, config: DataConfig) -> Table:
        """Its images and captions as a table. No image is opened; what is left out is counted and named."""
        raise NotImplementedError

    def draw(self, config: DataConfig, side: int, progress: DataProgress | None = None) -> DataSet:
        """All splits at one image size, of a source that is drawn."""
        raise NotImplementedError

    def count_images(self, config: DataConfig, table: Table | None = None) -> int:
        """Return the number of images, without those that the data itself holds out.

        No image is opened, so how many of them will be held out by content is not known yet. Pass `table` if it was
        read already.
        """
        return count_for_training((table or self.read_table(config)).rows)


class Specificity(IntEnum):
    """Which of several forms of data in one folder is meant: the most specific, which comes first here."""

    ANNOTATIONS = 1
    """A JSON file for the whole data set, named as such files usually are."""
    METADATA = 2
    """Tables called metadata, in any folder: each names the images beside it."""
    CAPTIONS = 3
    """A table named as tables of captions usually are."""
    TABLE = 4
    """A table of any other name."""
    JSON = 5
    """A JSON file of any other name."""
    SHARDS = 6
    PARQUET = 7
    TEXT_FILES = 8
    CLASS_FOLDERS = 9


@dataclass(frozen=True)
class Form:
    """Data of one form that a folder holds, and the files that make it."""

    specificity: Specificity
    files: Sequence[str]
    """Paths below the folder."""
    sure: bool = True
    """Whether the names say so. A file of any other name may be something else, such as settings or a list of dates."""
    format: FileFormat | None = None
    """What reads all the files together; None for tables, each of which is read as its ending says."""

    @property
    def belongs_together(self) -> bool:
        """Whether several files are parts of one data set: each says its split, or names the images beside it."""
        metadata = self.specificity == Specificity.METADATA
        return len(self.files) == 1 or metadata or all(split_of_path(name) for name in self.files)


@dataclass(frozen=True)
class Files:
    """Files to read: their paths below a folder, and the split that each path says, or an empty text. Where a format
    reads a whole folder together, no path says one."""

    root: Path
    names: Sequence[str]
    splits: Sequence[str] = ()

    def paths(self) -> list[tuple[Path, str]]:
        """Each file with its split."""
        splits = self.splits or [""] * len(self.names)
        return [(self.root / name, split) for name, split in zip(self.names, splits, strict=True)]


class FileFormat:
    """One format of data in files."""

    label: ClassVar[str] = ""
    """What people call several files of it, where they are read together; empty for tables, which go by their names."""
    endings: ClassVar[tuple[str, ...]] = ()
    """How names of its files end."""
    by_pattern: ClassVar[bool] = False
    """Whether a pattern may name several of its files, as with shards."""
    name_says_split: ClassVar[bool] = False
    """Whether the name of a single file says which split it holds, as in COCO's captions_val2017.json."""
    reads_any_text: ClassVar[bool] = False
    """Whether files whose ending says nothing are tried as this format."""
    unit: ClassVar[str] = "files"
    """What people call its files where a pattern names them."""

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        """The forms of this format among the files of a folder; forms without files are none."""
        return ()

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        """Collect the rows of its files. Returns what was recognised and guessed, for the user."""
        raise NotImplementedError

    def is_table(self, path: Path, root: Path, config: DataConfig) -> bool:
        """Whether a file of its ending really is a table of images and captions."""
        try:
            self.read(
                Files(root, [path.relative_to(root).as_posix()], [""]), config, RowCollector()
            )
        except NotATable:
            return False
        return True


class TableFormat(FileFormat):
    """A format whose files are tables: a row names an image and holds its captions."""

    metadata: ClassVar[str] = ""
    """The name of tables that may lie in any folder, as Hugging Face's imagefolder has them."""
    usual_names: ClassVar[re.Pattern[str]]
    """Names that tables of captions usually have."""
    table_endings: ClassVar[tuple[str, ...]] = ()
    """Endings that tables of any name may have."""

    def recognise(self, names: Sequence[str]) -> Iterable[Form]:
        top = [name for name in names if "/" not in name]
        usual = [name for name in top if self.usual_names.fullmatch(name)]
        known = {*usual, self.metadata}
        others = [
            name for name in top if name.lower().endswith(self.table_endings) and name not in known
        ]
        yield Form(
            Specificity.METADATA,
            [name for name in names if posixpath.basename(name) == self.metadata],
        )
        yield Form(Specificity.CAPTIONS, usual)
        yield Form(Specificity.TABLE, others, sure=False)


Registered = TypeVar("Registered", bound=type[Source] | type[FileFormat])
BUILT_IN: dict[str, Source] = {}
"""The built-in sources by name."""
FORMATS: list[FileFormat] = []
"""The formats of files."""


def register(kind: Registered) -> Registered:
    """Make a source or a format known; used as a decorator."""
    only = kind()
    if isinstance(only, Source):
        BUILT_IN[only.name] = only
    elif isinstance(only, FileFormat):
        FORMATS.append(only)
    return kind


def format_of(name: str) -> FileFormat | None:
    """The format that a file's ending says; None where it says none."""
    return next((each for each in FORMATS if name.lower().endswith(each.endings)), None)


def forms_in(names: Sequence[str]) -> list[Form]:
    """The forms of data that a folder holds, the most specific first. Tables of several formats may make one form."""
    found = [form for each in FORMATS for form in each.recognise(names)]
    order = {name: at for at, name in enumerate(names)}
    forms = []
    for specificity in Specificity:
        same = [form for form in found if form.specificity == specificity and form.files]
        if same:
            files = sorted((name for form in same for name in form.files), key=order.__getitem__)
            forms.append(Form(specificity, files, same[0].sure, same[0].format))
    return forms


def data_sets_below(names: Sequence[str]) -> list[str]:
    """Tables of captions in the folders of a folder: these folders are data sets, not classes."""
    tables = [each for each in FORMATS if isinstance(each, TableFormat)]
    below = [name for name in names if name.count("/") == 1]
    return [
        name
        for name in below
        if any(each.usual_names.fullmatch(posixpath.basename(name)) for each in tables)
    ]


def split_in_name(name: str) -> str:
    """The split that a file's name says, as in captions_train2017.json or coco-val-00001.tar; empty where none."""
    words = re.findall(r"[a-z]+", name.lower())
    return next((split for word in words if (split := split_named(word))), "")


def split_of_path(name: str) -> str:
    """The split that a file's folder or else its own name says; empty where neither does."""
    folders, leaf = posixpath.split(name)
    return next(
        (split for part in folders.split("/") if (split := split_in_name(part))),
        split_in_name(leaf),
    )


def absolute(source: str) -> str:
    """A source as it can be named from any folder: a path that begins at the root, or a built-in source's name."""
    return source if source in BUILT_IN else os.path.abspath(source)

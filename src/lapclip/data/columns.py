"""Choose the columns of a table that hold images, captions and splits.

The settings come first. Otherwise the first rows decide:

- images: a column with a usual name (`IMAGE_NAMES`) whose values are files, else the column with most values that are
  files, else the column with most values that end like image files;
- captions: a column of text with a usual name (`CAPTION_NAMES`), else the column of text with most distinct values,
  else a column of numbers with a usual name; `caption_1`, `caption_2` and so on belong together;
- splits: a column with a usual name (`SPLIT_NAMES`), or any column that holds nothing but words such as "train".

Where no column fits, the error lists the columns and names the setting that chooses one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lapclip.config import AUTO, DataConfig
from lapclip.data.find_images import ImageFinder, best_folder, is_image
from lapclip.data.splits import split_named
from lapclip.data.table import ImageFile, UsedColumns, column_title, is_number
from lapclip.errors import DataError, nearest

# The most usual names come first.
IMAGE_NAMES = ("filepath", "file_name", "filename", "image", "image_path", "img_path", "image_file", "image_name", "img",
               "picture", "photo", "path", "file", "name", "image_id", "id", "key")  # fmt: skip
CAPTION_NAMES = ("caption", "captions", "text", "sentence", "sentences", "raw", "description", "comment", "alt_text",
                 "alt", "prompt", "title", "label", "class", "category", "tag", "tags")  # fmt: skip
SPLIT_NAMES = ("split", "set", "subset", "partition", "fold")

SAMPLE_ROWS = 200
SAMPLE_FILES = 24  # distinct values of a column that are looked up in each folder
MAX_LISTED_COLUMNS = 8

_ENDS_WITH_NUMBER = re.compile(r"[\s_-]?\d+$")


class NotATable(DataError):
    """A file that could have been a table of images and captions, and is not."""


@dataclass(frozen=True)
class Column:
    """A column with its values in the first rows, without empty ones."""

    index: int
    name: str
    values: list[str]

    @property
    def key(self) -> str:
        """The name in lower case, with underscores instead of spaces and hyphens."""
        return normalize(self.name)

    @property
    def stem(self) -> str:
        """The key without a number at its end: `caption` for "Caption 2"."""
        return without_number(self.key)

    @property
    def holds_text(self) -> bool:
        """Whether at least half of the values are neither numbers, image files nor web addresses."""
        texts = [value for value in self.values if not is_number(value) and not is_link(value)]
        return len(texts) > 0 and len(texts) >= len(self.values) / 2

    @property
    def is_prose(self) -> bool:
        """Whether most values have several words and none ends like an image file."""
        with_spaces = sum(" " in value for value in self.values)
        return with_spaces > len(self.values) / 2 and not any(map(is_image, self.values))


@dataclass(frozen=True)
class FileMatch:
    """A column of images, if its values are files of a folder."""

    column: Column
    folder: ImageFinder
    file_share: float
    """Share of the values that are files of the folder."""
    ending_share: float
    """Share of the values that end like image files."""

    @property
    def is_usual(self) -> bool:
        """Whether the column has a usual name."""
        return self.column.key in IMAGE_NAMES


@dataclass(frozen=True)
class Columns:
    """The chosen columns of a table, by their positions."""

    names: Sequence[str]
    image: int
    captions: tuple[int, ...]
    split: int | None
    folder: ImageFinder
    """Folder that the names of images are relative to."""
    file_share: float
    """Share of the first rows whose image was found."""
    has_endings: bool
    """Whether names of images end like image files."""
    has_header: bool = True

    @property
    def used(self) -> UsedColumns:
        """The chosen columns by name."""
        split = None if self.split is None else self.names[self.split]
        captions = tuple(self.names[index] for index in self.captions)
        return UsedColumns(self.names[self.image], captions, split)

    def repeated_names(self) -> list[str]:
        """Describe names that several columns have, and how many of these columns are read."""
        if not self.has_header:
            return []
        keys = [normalize(name) for name in self.names]
        used_keys = [keys[index] for index in (self.image, *self.captions)]
        if self.split is not None:
            used_keys.append(keys[self.split])
        notes = []
        for key, count in Counter(keys).items():
            if count > 1:
                used = used_keys.count(key)
                notes.append(
                    f"{count} columns are called {column_title(key)}, {used} of them are read"
                )
        return notes


def choose_columns(
    rows: Sequence[Sequence[str]], folders: Sequence[ImageFinder], config: DataConfig, table: str
) -> Columns:
    """Choose the columns of a table from its first rows, the first of which may be a header.

    `table` is its name in errors. Raises NotATable if no column fits.
    """
    header = [cell.strip() or f"column{number}" for number, cell in enumerate(rows[0], 1)]
    if len(rows) > 1:
        columns = choose_named_columns(header, rows[1:], folders, config, table)
        if is_header(rows, columns, config):
            return columns
    elif any(normalize(name) in IMAGE_NAMES for name in header):
        raise NotATable(f"{table} has a header and no rows.", hint="an image and a caption a line")
    numbered = [f"column{number}" for number in range(1, len(header) + 1)]
    columns = choose_named_columns(numbered, rows, folders, config, table)
    return replace(columns, has_header=False)


def choose_named_columns(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    folders: Sequence[ImageFinder],
    config: DataConfig,
    table: str,
) -> Columns:
    """Choose the columns of a table whose column names are known."""
    columns = split_into_columns(names, rows)
    image = choose_image_column(columns, folders, config, table)
    split = choose_split_column(columns, image.column, config, table)
    captions = choose_caption_columns(columns, [image.column, split], config, table)
    split_index = None
    if split is not None:
        split_index = split.index
    return Columns(
        names=names,
        image=image.column.index,
        captions=tuple(column.index for column in captions),
        split=split_index,
        folder=image.folder,
        file_share=image.file_share,
        has_endings=image.ending_share > 0,
    )


def split_into_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of some rows. Rows may be short."""
    columns = []
    for index, name in enumerate(names):
        cells = [row[index].strip() for row in rows if index < len(row)]
        columns.append(Column(index, name, [cell for cell in cells if cell]))
    return columns


def choose_image_column(
    columns: Sequence[Column], folders: Sequence[ImageFinder], config: DataConfig, table: str
) -> FileMatch:
    """Choose the column of images and the folder that its values are relative to."""
    requested = requested_columns(columns, config.picture_column, "picture_column", table)
    if requested:
        matches = [match_files(column, folders) for column in requested]
        return max(matches, key=lambda match: match.file_share)

    # Looking up sentences in every folder would take long.
    candidates = [column for column in columns if column.values and not column.is_prose]
    matches = [match_files(column, folders) for column in candidates]
    matches = [match for match in matches if match.file_share or match.ending_share]
    if not matches:
        raise NotATable(
            f"{table}: which column names the images? In none of them are files that are there. "
            f"Its columns: {list_names(columns)}.",
            hint="--set data.picture_column=NAME, or --set data.separator=';'",
        )
    usual_files = [match for match in matches if match.is_usual and match.file_share >= 0.5]
    if usual_files:
        return min(usual_files, key=lambda match: IMAGE_NAMES.index(match.column.key))
    return max(matches, key=lambda match: (match.file_share, match.ending_share, match.is_usual))


def match_files(column: Column, folders: Sequence[ImageFinder]) -> FileMatch:
    """Look up some values of a column in the folders, and return the folder that has most of them."""
    sample = list(dict.fromkeys(column.values))[:SAMPLE_FILES]
    folder, found = best_folder(folders, sample)
    endings = sum(map(is_image, sample))
    size = max(1, len(sample))
    return FileMatch(column, folder, found / size, endings / size)


def choose_split_column(
    columns: Sequence[Column], image: Column | None, config: DataConfig, table: str
) -> Column | None:
    """Choose the column of splits. None if the table has none, or if the settings ignore it.

    `image` is the column of images, which is never chosen unless the settings name it.
    """
    if config.split_column == "":
        return None
    requested = requested_columns(columns, config.split_column, "split_column", table)
    if requested:
        return requested[0]
    for column in columns:
        if column is image:
            continue
        splits = [value for value in column.values if split_named(value) is not None]
        if column.key in SPLIT_NAMES and len(splits) > len(column.values) / 2:
            return column
        # A caption may be the single word "test", but hardly every caption of a table is.
        if len(splits) == len(column.values) > 2:
            return column
    return None


def choose_caption_columns(
    columns: Sequence[Column], taken: Sequence[Column | None], config: DataConfig, table: str
) -> list[Column]:
    """Choose the columns of captions.

    Columns in `taken`, which hold images or splits, are never chosen unless the settings name them.
    """
    requested = requested_columns(columns, config.caption_column, "caption_column", table)
    if requested:
        return requested
    free = [column for column in columns if column not in taken]
    texts = [column for column in free if column.holds_text]
    usual = [column for column in free if column.stem in CAPTION_NAMES]
    usual_texts = [column for column in texts if column.stem in CAPTION_NAMES]
    if usual_texts:
        best = min(usual_texts, key=lambda column: CAPTION_NAMES.index(column.stem))
    elif texts:
        best = max(texts, key=lambda column: (len(set(column.values)), count_words(column.values)))
    elif usual:
        best = min(usual, key=lambda column: CAPTION_NAMES.index(column.stem))
    else:
        raise NotATable(
            f"{table}: which column holds the captions? None of them holds text. "
            f"Its columns: {list_names(columns)}.",
            hint="--set data.caption_column=NAME, or --set data.separator=';'",
        )
    return [column for column in free if belong_together(column, best)]


def belong_together(column: Column, other: Column) -> bool:
    """Return whether two columns of captions have one name, apart from a number at the end."""
    if column.key == other.key:
        return True
    both_numbered = column.key != column.stem and other.key != other.stem
    return both_numbered and column.stem == other.stem and column.stem in CAPTION_NAMES


def requested_columns(
    columns: Sequence[Column], value: str, setting: str, table: str
) -> list[Column]:
    """Return the columns that a setting names. Empty if the choice is left to us.

    The setting holds one name or several between commas. `column1` is the first column of any table.
    """
    if value in (AUTO, ""):
        return []
    by_key: dict[str, list[Column]] = {}
    for column in columns:
        for key in (column.key, f"column{column.index + 1}"):
            by_key.setdefault(key, []).append(column)

    requested = [value] if normalize(value) in by_key else value.split(",")
    found: dict[int, Column] = {}
    for name in requested:
        if normalize(name) not in by_key:
            names = [column_title(column.name) for column in columns]
            raise DataError(
                f"{table}: data.{setting} is {name}, but there is no such column. "
                + nearest(name, names),
                hint=f"--set data.{setting}=auto",
            )
        found.update((column.index, column) for column in by_key[normalize(name)])
    return list(found.values())


def is_header(rows: Sequence[Sequence[str]], columns: Columns, config: DataConfig) -> bool:
    """Return whether the first row holds the names of the columns.

    A first row whose image is missing is no header. So a header must have a usual name, a name from the settings, or
    a cell that looks like no other cell of the image column.
    """
    first = rows[0]
    if columns.image >= len(first):
        return True
    cell = first[columns.image]
    if is_image(cell) or isinstance(columns.folder.find(cell), ImageFile):
        return False
    settings = (config.picture_column, config.caption_column, config.split_column)
    known = {*IMAGE_NAMES, *CAPTION_NAMES, *SPLIT_NAMES}
    known.update(normalize(name) for name in ",".join(settings).split(",") if name != AUTO)
    keys = {normalize(cell) for cell in first if cell.strip()}
    if known & (keys | {without_number(key) for key in keys}):
        return True
    patterns = {letter_pattern(row[columns.image]) for row in rows[1:] if columns.image < len(row)}
    return letter_pattern(cell) not in patterns


def letter_pattern(text: str) -> str:
    """Return a text with "a" for each run of letters and "0" for each run of digits."""
    return re.sub(r"\d+", "0", re.sub(r"[^\W\d_]+", "a", text.strip()))


def normalize(name: str) -> str:
    """Return the name of a column in lower case, with underscores instead of spaces and hyphens."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def without_number(key: str) -> str:
    """Return a normalized name without a number at its end."""
    return _ENDS_WITH_NUMBER.sub("", key)


def is_link(value: str) -> bool:
    """Return whether a value is the name of an image file or a web address."""
    return is_image(value) or "://" in value


def count_words(values: Iterable[str]) -> int:
    """Return the number of words in all values together."""
    return sum(len(value.split()) for value in values)


def list_names(columns: Sequence[Column]) -> str:
    """Return the names of the first columns for a message."""
    names = [column_title(column.name) for column in columns[:MAX_LISTED_COLUMNS]]
    if len(columns) > MAX_LISTED_COLUMNS:
        names.append("...")
    return ", ".join(names)

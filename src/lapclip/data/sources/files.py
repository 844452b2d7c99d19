"""Files as a source: a folder, a file or a pattern of files, whose format is recognized.

Also the lines of text files in the encodings that people have: UTF-8 and UTF-16 with or without a mark, else
Windows-1252.
"""

from __future__ import annotations

import codecs
import glob
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.columns import NotATable
from lapclip.data.find_images import LINK_OUTSIDE, is_image, plain_file, walk
from lapclip.data.sources.registry import (
    FORMATS,
    FileFormat,
    Files,
    Form,
    Source,
    Specificity,
    data_sets_below,
    format_of,
    forms_in,
    split_in_name,
    split_of_path,
)
from lapclip.data.table import RowCollector, Skipped, Table
from lapclip.errors import DataError, closest, first_line
from lapclip.text import counted

MAX_FILES = 100_000  # that a pattern may name
MAX_GLOBS = 10_000  # patterns with * and ? that braces may stand for, each of which lists a folder
EXPECTED = "captions.csv, metadata.jsonl or one .txt beside each image"
UNPACKING = {  # commands by the ending of a compressed file; the longest endings come first
    ".tgz": "tar -xzf", ".tar.bz2": "tar -xjf", ".tar.xz": "tar -xJf", ".tar.zst": "zstd -d",
    ".zip": "unzip", ".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "zstd -d", ".7z": "7z x", ".rar": "unrar x",
}  # fmt: skip
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class NoCaptions(DataError):
    """A folder without captions. It may hold images."""


class FileSource(Source):
    """A folder, a file or a pattern of files."""

    def read_table(self, config: DataConfig) -> Table:
        source = config.source
        if "://" in source or source.startswith("pipe:"):
            raise DataError(
                f"{source} is not a local path.", hint="download it first, then name the folder"
            )
        if "\0" in source or not source.strip():
            raise DataError(
                "data.source names nothing.", hint="a folder or a table, as docs/data.md lists them"
            )
        path = Path(source).expanduser()
        try:
            if path.is_dir():
                return _read_folder(path, config)
            if plain_file(path):
                return _read_file(path, config)
            if os.path.lexists(path):
                raise DataError(
                    f"{source} is not a plain file or folder.",
                    hint="a folder of images with captions",
                )
            if "{" in source or glob.has_magic(source):
                return _read_pattern(source, config)
        except OSError as error:
            raise DataError(
                f"{source} cannot be read: {error.strerror or first_line(error)}."
            ) from error
        raise _no_such_source(path)


FILES = FileSource()


# -- a file or a pattern -----------------------------------------------------------------------------------------------


def _read_file(path: Path, config: DataConfig) -> Table:
    """Read a file that the user names. Its name chooses the split only if that is part of its format, as in COCO."""
    if format_of(path.name) is None and is_foreign(path):
        raise _unknown_file(path)
    collector = _collector(config)
    form = _format_of(path.name)
    split = split_in_name(path.name) if form.name_says_split else ""
    how = form.read(Files(path.parent, [path.name], [split]), config, collector)
    return collector.table(path.name, f"{path.name}: {how}")


def _read_pattern(source: str, config: DataConfig) -> Table:
    """Read files of one format by a pattern, such as photos-{00000..00012}.tar."""
    named = [Path(os.path.abspath(path)) for path in expand(os.path.expanduser(source))]
    paths = [path for path in named if plain_file(path)]
    if not paths:
        raise DataError(
            f"No file matches {source}.",
            hint="a pattern such as 'photos-{00000..00012}.tar' or 'data/*.tar'",
        )
    if len(named) == 1:
        return _read_file(paths[0], config)
    collector = _collector(config)
    for path in named:
        if path not in paths:
            collector.skip(str(path), "there is no such file")
    for form in FORMATS:
        if form.by_pattern and all(path.name.lower().endswith(form.endings) for path in paths):
            root = _common_folder(source, paths)
            names = [path.relative_to(root).as_posix() for path in paths]
            files = Files(root, names, [split_of_path(name) for name in names])
            how = form.read(files, config, collector)
            return collector.table(form.label, f"{len(paths)} {form.unit}: {how}")
    for path in paths:
        if unpacking_command(path.name):
            raise _unknown_file(path)
    raise DataError(
        f"{source} names files that are neither tar nor parquet.",
        hint="one file or folder at a time",
    )


def _common_folder(source: str, paths: Sequence[Path]) -> Path:
    try:
        return Path(os.path.commonpath([path.parent for path in paths]))
    except ValueError:  # on Windows
        raise DataError(
            f"{source} names files on several drives.", hint="files on one drive at a time"
        ) from None


def expand(pattern: str) -> list[Path]:
    """Return the files that a pattern names: ranges such as {00000..00012}, lists such as {a,b}, and * and ?."""
    paths: dict[str, None] = {}
    for count, name in enumerate(_expand_braces(pattern)):
        if len(paths) > MAX_FILES:
            raise DataError(f"{pattern} names more than {MAX_FILES:,} files.")
        if not glob.has_magic(name):
            paths[name] = None
            continue
        if count >= MAX_GLOBS:
            raise DataError(
                f"{pattern} stands for more than {MAX_GLOBS:,} patterns.", hint="fewer braces"
            )
        paths.update(dict.fromkeys(sorted(glob.glob(name))))
    return [Path(path) for path in paths]


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names or patterns that a pattern with braces stands for."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    options = braces[1].split(",")
    span = _RANGE.fullmatch(braces[1])
    if span:
        first, last = int(span[1]), int(span[2])
        if last - first >= MAX_FILES:
            raise DataError(f"{pattern} names more than {MAX_FILES:,} files.")
        options = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    for option in options:
        yield from _expand_braces(pattern[: braces.start()] + option + pattern[braces.end() :])


# -- a folder ----------------------------------------------------------------------------------------------------------


def _read_folder(root: Path, config: DataConfig, skipped_outside: Sequence[Skipped] = ()) -> Table:
    """Read a folder as the most specific form of data that it holds.

    A folder that holds nothing but another folder, as unpacking leaves it, is read as that one. `skipped_outside` is
    what was left out of the outer folder.
    """
    skipped = list(skipped_outside)
    files = list(walk(root, skipped))
    forms = forms_in(files)
    if not forms:
        tops = {name.partition("/")[0] for name in files}
        if len(tops) == 1 and "/" in files[0]:
            (only,) = tops
            outside = [one for one in skipped if not one.where.startswith(f"{only}/")]
            return _read_folder(root / only, config, outside)
        raise _nothing_in_folder(root, files, skipped)
    if forms[0].specificity == Specificity.CLASS_FOLDERS and (tables := data_sets_below(files)):
        raise DataError(
            f"{root} holds data sets of its own, such as {tables[0]}.",
            hint=f"name one: {root / tables[0]}",
        )
    for form in forms[:-1]:
        try:
            return _read_form(root, form, forms, skipped, config)
        except NotATable:
            if form.sure:
                raise
    return _read_form(root, forms[-1], forms, skipped, config)


def _read_form(
    root: Path, form: Form, forms: Sequence[Form], skipped: Sequence[Skipped], config: DataConfig
) -> Table:
    """Read a folder as one of the forms that it holds."""
    collector = _collector(config)
    for one in skipped:
        # Rows of a table name their images themselves.
        if form.format or not is_image(one.where):
            collector.skip(one.where, one.why)

    if form.format is None:
        kind, how = _read_tables(root, _choose_table(root, form, config), config, collector)
    else:
        kind = form.format.label
        splits = [split_of_path(name) for name in form.files] if form.format.by_pattern else ()
        how = form.format.read(Files(root, form.files, splits), config, collector)
        if form.format.by_pattern:
            how = f"{len(form.files)} {kind}: {how}"

    unused = []
    for other in forms:
        # The folders of images that a table names look like classes, and are none.
        if other is not form and other.specificity != Specificity.CLASS_FOLDERS:
            unused.append(other.format.label if other.format else other.files[0])
    if unused:
        how = f"{how}; also there and not used: {', '.join(unused)}"
    return collector.table(kind, how)


def _choose_table(root: Path, form: Form, config: DataConfig) -> Form:
    """Return the form with the files that belong together, or with the only one that is a table."""
    if form.belongs_together:
        return form
    tables = [name for name in form.files if _format_of(name).is_table(root / name, root, config)]
    if len(tables) == 1:
        return Form(form.specificity, tables, form.sure)
    examples = ", ".join((tables or form.files)[:4])
    if not tables:
        raise NotATable(f"None of the tables in {root} names images and captions: {examples}.")
    raise DataError(
        f"{root} has several tables: {examples}.", hint=f"name the one to use: {root / tables[0]}"
    )


def _read_tables(
    root: Path, form: Form, config: DataConfig, collector: RowCollector
) -> tuple[str, str]:
    """Read the tables of a folder: one, or one for each split. Returns their kind and how they were read."""
    names_by_how: dict[str, list[str]] = {}
    for name in form.files:
        table_format = _format_of(name)
        split = ""
        if len(form.files) > 1 or table_format.name_says_split:
            split = split_of_path(name)
        how = table_format.read(Files(root, [name], [split]), config, collector)
        names_by_how.setdefault(how, []).append(name)
    how = "; ".join(f"{', '.join(names)}: {how}" for how, names in names_by_how.items())
    if len(form.files) == 1:
        return form.files[0], how
    return f"{len(form.files)} tables", how


def _format_of(name: str) -> FileFormat:
    """Return the format of a file by its ending. A file of unknown ending is tried as a table in a text file."""
    known = format_of(name)
    if known:
        return known
    return next(form for form in FORMATS if form.reads_any_text)


def _collector(config: DataConfig) -> RowCollector:
    return RowCollector(with_splits=config.split_column != "")


# -- where there is no data --------------------------------------------------------------------------------------------


def unpacking_command(name: str) -> str:
    """Return the command that unpacks a compressed file. Empty for any other file."""
    for ending, command in UNPACKING.items():
        if name.lower().endswith(ending):
            return f"{command} {shlex.quote(name)}"
    return ""


def is_foreign(path: Path) -> bool:
    """Return whether a file is no text: it is compressed, an image, or has bytes that text never has."""
    if unpacking_command(path.name) or is_image(path.name):
        return True
    with open(path, "rb") as file:
        start = file.read(4096)
    return not start.startswith(BYTE_ORDER_MARKS) and b"\0" in start


def _no_such_source(path: Path) -> DataError:
    message = f"There is no {path}."
    try:
        similar = closest(path.name, os.listdir(path.parent))
    except (OSError, ValueError):
        similar = None
    if similar:
        message += f" Did you mean {path.parent / similar}?"
    return DataError(message, hint="a folder or a table, as docs/data.md lists them")


def _unknown_file(path: Path) -> DataError:
    command = unpacking_command(path.name)
    if command:
        return DataError(f"{path.name} is compressed and has to be unpacked first.", hint=command)
    if is_image(path.name):
        return DataError(
            f"{path.name} is a single image. Training needs many, with captions.",
            hint=f"the folder of the images, with {EXPECTED}",
        )
    return DataError(
        f"{path.name} is no form of data that is known here.",
        hint=f"a folder with {EXPECTED}; a CSV, JSON, tar or parquet file",
    )


def _nothing_in_folder(root: Path, files: Sequence[str], skipped: Sequence[Skipped]) -> NoCaptions:
    """Return the error for a folder without captions, which tells what else is in it."""
    links = sum(one.why == LINK_OUTSIDE for one in skipped)
    images = sum(map(is_image, files))
    commands = [command for name in files if (command := unpacking_command(name))]
    endings = Counter(os.path.splitext(name)[1].lower() or "no ending" for name in files)
    listed = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(3))
    if links > len(files):  # as in a snapshot of Hugging Face, whose files lie elsewhere
        return NoCaptions(
            f"{root} has no data, but {counted(links, 'link')} out of it, which are not followed.",
            hint="the real folder that holds the files, or a copy with files instead of links",
        )
    if images:
        return NoCaptions(
            f"No captions found in {root}, which has {counted(images, 'image')}. Expected {EXPECTED}.",
            hint="a captions.csv beside the images, with lines such as: dog.jpg,a dog in the snow",
        )
    if commands:
        return NoCaptions(f"{root} holds compressed files.", hint=commands[0])
    if not files:
        return NoCaptions(f"{root} is empty.", hint=f"a folder of images with {EXPECTED}")
    return NoCaptions(f"{root} has no images, but {listed}.", hint=f"images with {EXPECTED}")


MAX_LINE_LENGTH = 1_000_000  # characters; longer lines are cut, so that a file without line ends does not fill memory
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SAMPLE_BYTES = 4096  # at the start of a file, by which its encoding is recognized


def unmarked(start: bytes) -> str:
    """Return the encoding of a text that begins without a byte order mark.

    In UTF-16 every other byte of a Latin letter, a digit, a comma and a line end is zero.
    """
    characters = len(start) // 2
    first, second = start[0 : 2 * characters : 2].count(0), start[1 : 2 * characters : 2].count(0)
    if second > 0.4 * characters and first < 0.1 * characters:
        return "utf-16-le"
    if first > 0.4 * characters and second < 0.1 * characters:
        return "utf-16-be"
    return "utf-8"


_UNDECODED = re.compile("[\udc80-\udcff]")


def _as_windows(found: re.Match[str]) -> str:
    return bytes([ord(found[0]) - 0xDC00]).decode("cp1252", "replace")


def decode(data: bytes) -> str:
    """A short text. Bytes that are not UTF-8 are read as Windows-1252."""
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "")
    if encoding and encoding != "utf-8-sig":
        return data.decode(encoding, "replace").removeprefix("\ufeff")
    return _UNDECODED.sub(_as_windows, data.decode(encoding or "utf-8", "surrogateescape"))


class Lines:
    """The lines of a file with their numbers, counted from 1, and what was met on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.encoding = "utf-8"
        self.repaired = 0
        """Lines with bytes that are not UTF-8."""
        self.cut: set[int] = set()
        """Numbers of the lines that were too long and are cut off."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self.repaired, self.cut = 0, set()
        with open(self.path, "rb") as raw:
            start = raw.read(SAMPLE_BYTES)
            self.encoding = next(
                (name for mark, name in _MARKS if start.startswith(mark)), unmarked(start)
            )
            raw.seek(0)
            errors = "surrogateescape" if self.encoding.startswith("utf-8") else "replace"
            with io.TextIOWrapper(raw, encoding=self.encoding, errors=errors, newline="") as file:
                number = 0
                while line := file.readline(MAX_LINE_LENGTH):
                    number += 1
                    if len(line) == MAX_LINE_LENGTH and line[-1] not in "\r\n":
                        self.cut.add(number)
                        while (more := file.readline(MAX_LINE_LENGTH)) and more[-1] not in "\r\n":
                            pass
                    if not line.isascii() and _UNDECODED.search(line):
                        self.repaired += 1
                        line = _UNDECODED.sub(_as_windows, line)
                    yield number, line

    def notes(self) -> list[str]:
        """What the user should know about the encoding."""
        notes = [] if self.encoding.startswith("utf-8") else [f"read as {self.encoding.upper()}"]
        if self.repaired:
            notes.append(f"{self.repaired:,} lines are not UTF-8 and were read as Windows-1252")
        return notes

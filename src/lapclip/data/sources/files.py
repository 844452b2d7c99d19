"""Files as a source: a folder, a file or a pattern of files, whose format is recognised; what was found instead
where there is no data; and the lines of text files in whatever encoding people have: UTF-8 with or without a mark,
UTF-16, and Windows-1252 last."""

from __future__ import annotations

import codecs
import glob
import io
import os
import re
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
from lapclip.shell import quoted

MOST_FILES = 100_000
"""Files that a pattern may name."""
MOST_PATTERNS = 10_000
"""Patterns with * and ? that braces may stand for: the folder is looked through for each."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class FileSource(Source):
    """Whatever lies in files."""

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
            if not os.path.lexists(path):
                if "{" in source or glob.has_magic(source):
                    return _read_pattern(source, config)
                raise no_such_source(source)
        except OSError as error:
            raise DataError(
                f"{source} cannot be read: {error.strerror or first_line(error)}."
            ) from error
        raise DataError(
            f"{source} is not a plain file or folder.", hint="a folder of images with captions"
        )


FILES = FileSource()


def expand(pattern: str) -> list[Path]:
    """The files that a pattern names: ranges such as {00000..00012}, lists such as {a,b}, and * and ?."""
    found = []
    for at, name in enumerate(_unfolded(pattern)):
        if len(found) > MOST_FILES:
            raise DataError(f"{pattern} names more than {MOST_FILES:,} files.")
        if at >= MOST_PATTERNS and glob.has_magic(name):
            raise DataError(
                f"{pattern} stands for more than {MOST_PATTERNS:,} patterns.", hint="fewer braces"
            )
        found += sorted(glob.glob(name)) if glob.has_magic(name) else [name]
    return [Path(name) for name in dict.fromkeys(found)]


def _unfolded(pattern: str) -> Iterator[str]:
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    span = _RANGE.fullmatch(braces[1])
    if span:
        first, last = int(span[1]), int(span[2])
        if last - first >= MOST_FILES:
            raise DataError(f"{pattern} names more than {MOST_FILES:,} files.")
        options = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    else:
        options = braces[1].split(",")
    for option in options:
        yield from _unfolded(pattern[: braces.start()] + option + pattern[braces.end() :])


def _format_of(name: str) -> FileFormat:
    """The format of a file by its ending. What says nothing else is tried as a table in a text file."""
    return format_of(name) or next(each for each in FORMATS if each.reads_any_text)


def _collector(config: DataConfig) -> RowCollector:
    return RowCollector(with_splits=config.split_column != "")


def _read_file(path: Path, config: DataConfig) -> Table:
    """A file that the user names. Its own name says no split, except in COCO, where it is part of the form."""
    if format_of(path.name) is None and is_foreign(path):
        raise unknown_file(path)
    collector = _collector(config)
    found = _format_of(path.name)
    split = split_in_name(path.name) if found.name_says_split else ""
    how = found.read(Files(path.parent, [path.name], [split]), config, collector)
    return collector.table(path.name, f"{path.name}: {how}")


def _read_pattern(source: str, config: DataConfig) -> Table:
    """Files of one format by a pattern, such as photos-{00000..00012}.tar."""
    named = [Path(os.path.abspath(path)) for path in expand(os.path.expanduser(source))]
    paths = [path for path in named if plain_file(path)]
    if not paths:
        raise DataError(
            f"No file matches {source}.",
            hint="a pattern such as 'photos-{00000..00012}.tar' or 'data/*.tar'",
        )
    if len(paths) == 1 and len(named) == 1:
        return _read_file(paths[0], config)
    try:
        collector, root = (
            _collector(config),
            Path(os.path.commonpath([path.parent for path in paths])),
        )
    except ValueError:
        raise DataError(
            f"{source} names files on several drives.", hint="files on one drive at a time"
        ) from None
    for path in named:
        if path not in paths:
            collector.skip(str(path), "there is no such file")
    names = [path.relative_to(root).as_posix() for path in paths]
    for each in FORMATS:
        if each.by_pattern and all(name.lower().endswith(each.endings) for name in names):
            how = each.read(
                Files(root, names, [split_of_path(name) for name in names]), config, collector
            )
            return collector.table(each.label, f"{len(paths)} {each.unit}: {how}")
    packed = next((path for path in paths if how_to_unpack(path.name)), None)
    if packed:
        raise unknown_file(packed)
    raise DataError(
        f"{source} names files that are neither tar nor parquet.",
        hint="one file or folder at a time",
    )


def _read_folder(root: Path, config: DataConfig, around: Sequence[Skipped] = ()) -> Table:
    """A folder; `around` is what was left out of the one that it lies in."""
    skipped = list(around)
    files = list(walk(root, skipped))
    forms = forms_in(files)
    if not forms:
        inner = {name.partition("/")[0] for name in files}
        if (
            len(inner) == 1 and "/" in files[0]
        ):  # a folder in a folder, as unpacking an archive leaves it
            only = inner.pop()
            outside = [
                left_out for left_out in skipped if not left_out.where.startswith(f"{only}/")
            ]
            return _read_folder(root / only, config, outside)
        raise nothing_in_folder(root, files, skipped)
    if forms[0].specificity == Specificity.CLASS_FOLDERS and (tables := data_sets_below(files)):
        raise DataError(
            f"{root} holds data sets of its own, such as {tables[0]}.",
            hint=f"name one: {root / tables[0]}",
        )
    for at, form in enumerate(forms):
        try:
            return _read_form(root, form, [*forms[:at], *forms[at + 1 :]], skipped, config)
        except NotATable:
            if form.sure or form is forms[-1]:
                raise
    raise AssertionError("the last form is read or refused")


def _read_form(
    root: Path, form: Form, others: Sequence[Form], skipped: Sequence[Skipped], config: DataConfig
) -> Table:
    """A folder as one of the forms that it holds."""
    collector = _collector(config)
    # The folders of images that a table names look like classes, and are none.
    others = [other for other in others if other.specificity != Specificity.CLASS_FOLDERS]
    unused = [other.format.label if other.format else other.files[0] for other in others]
    beside = f"; also there and not used: {', '.join(unused)}" if unused else ""
    for left_out in skipped:
        # Rows of a table name their images themselves.
        if form.format or not is_image(left_out.where):
            collector.skip(left_out.where, left_out.why)
    if form.format is None:
        return _read_tables(root, _one_table(root, form, config), config, collector, beside)
    if not form.format.by_pattern:
        return collector.table(
            form.format.label, form.format.read(Files(root, form.files), config, collector) + beside
        )
    how = form.format.read(
        Files(root, form.files, [split_of_path(name) for name in form.files]), config, collector
    )
    return collector.table(
        form.format.label, f"{len(form.files)} {form.format.label}: {how}{beside}"
    )


def _one_table(root: Path, form: Form, config: DataConfig) -> Form:
    """A form whose files belong together; of several that do not, the only one that is a table."""
    if form.belongs_together:
        return form
    tables = [name for name in form.files if _format_of(name).is_table(root / name, root, config)]
    if len(tables) == 1:
        return Form(form.specificity, tables, form.sure)
    some = ", ".join((tables or form.files)[:4])
    if not tables:
        raise NotATable(f"None of the tables in {root} names images and captions: {some}.")
    raise DataError(
        f"{root} has several tables: {some}.", hint=f"name the one to use: {root / tables[0]}"
    )


def _read_tables(
    root: Path, form: Form, config: DataConfig, collector: RowCollector, beside: str
) -> Table:
    """The tables of a folder: one, or one a split."""
    read_as: dict[str, list[str]] = {}
    for name in form.files:
        found = _format_of(name)
        split = split_of_path(name) if len(form.files) > 1 or found.name_says_split else ""
        how = found.read(Files(root, [name], [split]), config, collector)
        read_as.setdefault(how, []).append(name)
    how = "; ".join(f"{', '.join(names)}: {how}" for how, names in read_as.items())
    return collector.table(
        form.files[0] if len(form.files) == 1 else f"{len(form.files)} tables", how + beside
    )


EXPECTED = "captions.csv, metadata.jsonl or one .txt beside each image"
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
PACKED = {
    ".zip": "unzip {0}",
    ".tar.gz": "tar -xzf {0}, or for shards: gunzip {0}",
    ".tgz": "tar -xzf {0}",
    ".tar.bz2": "tar -xjf {0}",
    ".tar.xz": "tar -xJf {0}",
    ".tar.zst": "zstd -d {0}",
    ".gz": "gunzip {0}",
    ".bz2": "bunzip2 {0}",
    ".xz": "unxz {0}",
    ".zst": "zstd -d {0}",
    ".7z": "7z x {0}",
    ".rar": "unrar x {0}",
}


def how_to_unpack(name: str) -> str:
    """The command that unpacks a compressed file; empty for any other file."""
    found = next(
        (command for ending, command in PACKED.items() if name.lower().endswith(ending)), ""
    )
    return found.format(quoted(f"./{name}" if name.startswith("-") else name))


def is_foreign(path: Path) -> bool:
    """Whether a file of unknown ending is no text: it is compressed, an image, or has bytes that text never has."""
    if how_to_unpack(path.name) or is_image(path.name):
        return True
    with open(path, "rb") as file:
        start = file.read(4096)
    return not start.startswith(BYTE_ORDER_MARKS) and b"\0" in start


def no_such_source(source: str) -> DataError:
    path = Path(source)
    try:
        near = closest(path.name, os.listdir(path.parent))
    except (OSError, ValueError):
        near = None
    guess = f" Did you mean {path.parent / near}?" if near else ""
    return DataError(
        f"There is no {source}.{guess}", hint="a folder or a table, as docs/data.md lists them"
    )


def unknown_file(path: Path) -> DataError:
    """A file that is none of the forms."""
    if command := how_to_unpack(path.name):
        return DataError(
            f"{path.name} is compressed. Images are read where they lie, so it has to be unpacked first.",
            hint=command,
        )
    if is_image(path.name):
        return DataError(
            f"{path.name} is a single image. Training needs many, with captions.",
            hint=f"the folder of the images, with {EXPECTED}",
        )
    return DataError(
        f"{path.name} is no form of data that is known here.",
        hint=f"a folder with {EXPECTED}; a CSV, JSON, tar or parquet file",
    )


class NoCaptions(DataError):
    """A folder in which there is nothing to learn from. It may hold images."""


def nothing_in_folder(
    root: Path, files: Sequence[str], skipped: Sequence[Skipped] = ()
) -> NoCaptions:
    """A folder without captions; `skipped` is what was left out while it was listed."""
    links = sum(left_out.why == LINK_OUTSIDE for left_out in skipped)
    if links > len(
        files
    ):  # as in a snapshot of Hugging Face, whose files are elsewhere under other names
        lead = "1 link leads" if links == 1 else f"{links:,} links lead"
        return NoCaptions(
            f"Nothing to learn from was found in {root}: {lead} out of it, and such links are not followed.",
            hint="the real folder that holds the files, or a copy with files instead of links",
        )
    if not files:
        return NoCaptions(f"{root} is empty.", hint=f"a folder of images with {EXPECTED}")
    images = sum(map(is_image, files))
    packed = next((name for name in files if how_to_unpack(name)), None)
    if packed and not images:
        return NoCaptions(
            f"{root} holds compressed files, such as {packed}.", hint=how_to_unpack(packed)
        )
    if images:
        few = "1 image" if images == 1 else f"{images:,} images"
        return NoCaptions(
            f"No captions found in {root}, which has {few}. Expected {EXPECTED}.",
            hint="a captions.csv beside the images, with lines such as: dog.jpg,a dog in the snow",
        )
    endings = Counter(os.path.splitext(name)[1].lower() or "no ending" for name in files)
    found = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(3))
    return NoCaptions(
        f"No images found in {root}. It has other files: {found}.", hint=f"images with {EXPECTED}"
    )


LONGEST_LINE = 1_000_000
"""Characters. What is longer is cut there, so that a file without line ends does not fill the memory."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SAMPLE_BYTES = 4096
"""Bytes at the start of a file by which its encoding is recognized."""


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
                while line := file.readline(LONGEST_LINE):
                    number += 1
                    if len(line) == LONGEST_LINE and line[-1] not in "\r\n":
                        self.cut.add(number)
                        while (more := file.readline(LONGEST_LINE)) and more[-1] not in "\r\n":
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

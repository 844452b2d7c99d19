"""Tables in text files: an image and a caption a line, under any separator and any names."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from lapclip.config import AUTO, DataConfig
from lapclip.data.columns import SAMPLE_ROWS, Columns, NotATable, choose_columns
from lapclip.data.find_images import ImageFinder, candidate_folders, is_image
from lapclip.data.sources.files import Lines
from lapclip.data.sources.registry import Files, TableFormat, register
from lapclip.data.splits import split_named
from lapclip.data.table import ImageFile, RowCollector
from lapclip.errors import DataError

SEPARATOR_NAMES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
SEPARATOR_WORDS = {
    "comma": ",", "tab": "\t", "\\t": "\t", "semicolon": ";", "bar": "|", "pipe": "|", "space": " ", "colon": ":",
}  # fmt: skip
MAX_QUOTED_LINES = 100  # an opening quote whose end is further away is a quote like any other


@register
class TextTables(TableFormat):
    """CSV and its relatives, under any ending that says nothing else."""

    endings = (".csv", ".tsv", ".txt")
    reads_any_text = True
    metadata = "metadata.csv"
    usual_names = re.compile(
        r"captions\.(csv|tsv|txt)|[^/]*\.token(\.txt)?|results[^/]*\.(csv|token)", re.IGNORECASE
    )
    table_endings = (".csv", ".tsv")

    def read(self, files: Files, config: DataConfig, collector: RowCollector) -> str:
        ((path, split),) = files.paths()
        folders = candidate_folders(path, files.root, config)
        separator, columns = choose_layout(path, folders, config)
        listed = {} if columns.split is not None else listed_splits(path)
        lines = Lines(path)
        images_before = len(collector)
        joined_captions = 0
        header_is_next = columns.has_header
        for number, cells in split_cells(lines, separator, lambda cells: is_row(cells, columns)):
            where = f"{path.name} line {number}"
            if header_is_next and len(cells) > 1:
                header_is_next = False
                continue
            if number in lines.cut:
                collector.skip(where, "the line is too long to be a row")
                continue
            joined_captions += fit_to_width(cells, columns, separator)
            if len(cells) <= max(columns.image, min(columns.captions)):
                collector.skip(where, f"{len(cells)} of {len(columns.names)} columns")
                continue
            image = columns.folder.find(cells[columns.image])
            row_split = split
            if columns.split is not None and columns.split < len(cells):
                row_split = cells[columns.split]
            if isinstance(image, ImageFile):
                row_split = listed.get(image.path.name, row_split)
            for index in columns.captions:
                if index >= len(cells):
                    collector.skip(where, f"there is no {columns.names[index]}")
                    continue
                for caption in several(cells[index]):
                    collector.add(image, caption, row_split, where)
        collector.columns[columns.used] += len(collector) - images_before

        name = SEPARATOR_NAMES.get(separator, repr(separator))
        notes = [f"separated by {name}", *columns.repeated_names(), *lines.notes()]
        if not columns.has_header:
            notes.append("no header")
        if listed:
            notes.append("splits from the lists beside it")
        if joined_captions:
            notes.append(
                f"{joined_captions:,} captions have an unquoted {name} and were joined again"
            )
        return "; ".join(notes)

    def is_table(self, path: Path, root: Path, config: DataConfig) -> bool:
        try:
            choose_layout(path, candidate_folders(path, root, config), config)
        except NotATable:
            return False
        return True


def fit_to_width(cells: list[str], columns: Columns, separator: str) -> bool:
    """Remove empty cells at the end of a row that is too long, and join a caption that was split.

    Spreadsheets fill up rows with empty cells. An unquoted caption may contain the separator. Returns whether a
    caption was joined.
    """
    width = len(columns.names)
    while len(cells) > width and not cells[-1].strip():
        cells.pop()
    extra = len(cells) - width
    if extra <= 0 or len(columns.captions) != 1:
        return False
    (first,) = columns.captions
    cells[first : first + extra + 1] = [separator.join(cells[first : first + extra + 1])]
    return True


def is_row(cells: list[str], columns: Columns) -> bool:
    """Return whether some cells are a row, because they name an image."""
    if len(cells) < 2 or len(cells) <= columns.image:
        return False
    name = cells[columns.image].strip(' "')
    if columns.has_endings:
        return is_image(name)
    return isinstance(columns.folder.find(name), ImageFile)


def listed_splits(path: Path) -> dict[str, str]:
    """The splits of images from the lists that Flickr8k has beside its captions, such as Flickr_8k.devImages.txt."""
    found = {}
    if ".token" in path.name.lower():
        for beside in sorted(path.parent.glob("*Images.txt")):
            split = split_named(beside.name.removesuffix("Images.txt").rpartition(".")[2])
            if split:
                found.update((line.strip(), split) for _, line in Lines(beside) if line.strip())
    return found


def several(cell: str) -> list[str]:
    """The captions of a cell: one, unless it is a JSON list of texts."""
    if cell.startswith("[") and cell.rstrip().endswith("]"):
        try:
            found = json.loads(cell)
        except (ValueError, RecursionError):
            return [cell]
        if found and isinstance(found, list) and all(isinstance(item, str) for item in found):
            return found
    return [cell]


def split_cells(
    lines: Iterable[tuple[int, str]],
    separator: str,
    is_row: Callable[[list[str]], bool] = lambda cells: False,
) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table with the number of their first line. Every line that is not blank is in exactly one row.

    A quoted cell may span lines, but not over one that `is_row` by itself: there the closing quote was forgotten.
    """
    waiting: list[tuple[int, str]] = []
    source = iter(lines)
    while True:
        number, line = waiting.pop(0) if waiting else next(source, (0, ""))
        if not number:
            return
        if not line.strip():
            continue
        if '"' not in line:
            yield number, line.rstrip("\r\n").split(separator)
            continue
        cells, used = _quoted(line, waiting, source, separator, is_row)
        del waiting[:used]
        yield number, cells


def _quoted(
    line: str, waiting: list[tuple[int, str]], source: Iterator, separator: str, is_row
) -> tuple[list[str], int]:
    """The cells of a line with quotes, and how many of the lines after it belong to it."""
    text, used = line, 0
    while True:
        try:
            return next(csv.reader([text], delimiter=separator, strict=True)), used
        except csv.Error as error:
            unfinished = "unexpected end" in str(error)
        except StopIteration:
            return [text], used
        if not unfinished or used >= MAX_QUOTED_LINES:
            break
        if used == len(waiting):
            more = next(source, None)
            if more is None:
                break
            waiting.append(more)
        if is_row(waiting[used][1].rstrip("\r\n").split(separator)):
            break
        text += waiting[used][1]
        used += 1
    try:
        # The quote opens nothing that ends: within its line the lenient reader makes the best of it.
        return next(csv.reader([line.rstrip("\r\n")], delimiter=separator)), 0
    except (csv.Error, StopIteration):
        return line.rstrip("\r\n").split(separator), 0


def choose_layout(
    path: Path, folders: list[ImageFinder], config: DataConfig
) -> tuple[str, Columns]:
    """Return the separator and the columns of a table, chosen from its first rows.

    Prefers the separator with most images that are there, then the one with most rows of one width.
    """
    lines = list(islice(Lines(path), SAMPLE_ROWS))
    best: tuple[float, float] | None = None
    chosen: tuple[str, Columns] | None = None
    fault: NotATable | None = None
    for separator in candidate_separators(path, config):
        rows = [cells for _, cells in split_cells(lines, separator)]
        if not rows:
            raise NotATable(
                f"{path.name} is empty.", hint="a table with an image and a caption a line"
            )
        wide = [row for row in rows if len(row) > 1]
        if config.separator == AUTO and len(wide) < len(rows) / 2:
            continue
        try:
            columns = choose_columns(wide or rows, folders, config, path.name)
        except NotATable as error:
            fault = fault or error
            continue
        ((_, rows_of_one_width),) = Counter(map(len, rows)).most_common(1)
        fit = columns.file_share, rows_of_one_width / len(rows)
        if best is None or fit > best:
            best, chosen = fit, (separator, columns)
    if chosen:
        return chosen
    raise fault or NotATable(
        f"{path.name} is no table of images and captions: its lines have one column under every separator.",
        hint="an image and a caption a line, or --set data.separator=CHARACTER",
    )


def candidate_separators(path: Path, config: DataConfig) -> list[str]:
    """Return the separator of the settings, or all common ones with the likeliest first."""
    if config.separator == AUTO:
        common = list(SEPARATOR_NAMES)
        if path.suffix.lower() == ".tsv":
            common.sort(key=lambda separator: separator != "\t")
        return common
    separator = SEPARATOR_WORDS.get(config.separator.lower(), config.separator)
    if len(separator) != 1 or separator in '"\r\n':
        raise DataError(
            f"data.separator must be one character, not {config.separator!r}.", hint="tab or ;"
        )
    return [separator]

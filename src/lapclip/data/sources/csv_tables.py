"""Tables in text files: an image and a caption a line, under any separator and any names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from lapclip.config import AUTO, DataConfig
from lapclip.data.find_images import ImageFinder, candidate_folders, is_image
from lapclip.data.guess_columns import Columns, NotATable, guess_columns
from lapclip.data.sources.files import Lines
from lapclip.data.sources.registry import Files, TableFormat, register
from lapclip.data.splits import split_named
from lapclip.data.table import RowCollector
from lapclip.errors import DataError

SEPARATORS = {"comma": ",", "tab": "\t", "semicolon": ";", "bar": "|"}
_WORDS = {**SEPARATORS, "pipe": "|", "space": " ", "colon": ":", "\\t": "\t"}
SAMPLE = 200
"""First rows from which columns are guessed."""
MOST_LINES = 100
"""Lines that a quoted cell may span. An opening quote without an end is then a quote like any other."""


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
        separator, columns = _understand(path, folders, config)
        listed = listed_splits(path) if columns.split is None else {}
        lines = Lines(path)
        spilled = 0
        width, last = len(columns.names), max(columns.captions)
        rows = split_cells(lines, separator, lambda cells: _names_image(cells, columns))
        before_header = columns.header
        for number, cells in rows:
            where = f"{path.name} line {number}"
            if before_header and len(cells) > 1:
                before_header = False
                continue
            if number in lines.cut:
                collector.skip(where, "the line is too long to be a row")
                continue
            while len(cells) > width and not cells[-1].strip():
                cells.pop()  # spreadsheets fill up rows with empty cells
            if len(cells) > width and len(columns.captions) == 1:
                # A separator inside an unquoted caption: what is too much belongs to the caption.
                extra = len(cells) - width
                cells[last : last + extra + 1] = [separator.join(cells[last : last + extra + 1])]
                spilled += 1
            if len(cells) <= max(columns.image, min(columns.captions)):
                collector.skip(where, f"{len(cells)} of {width} columns")
                continue
            image = columns.folder.find(cells[columns.image])
            own = (
                cells[columns.split]
                if columns.split is not None and columns.split < len(cells)
                else split
            )
            if listed and not isinstance(image, str):
                own = listed.get(image.path.name, own)
            for column in columns.captions:
                if column < len(cells):
                    for caption in several(cells[column]):
                        collector.add(image, caption, own, where)
                else:
                    collector.skip(where, f"there is no {columns.names[column]}")
        word = next(
            (word for word, sign in SEPARATORS.items() if sign == separator), repr(separator)
        )
        notes = [
            f"{columns.summary()}, separated by {word}",
            *([] if columns.header else ["no header"]),
            *(["splits from the lists beside it"] if listed else []),
            *lines.notes(),
        ]
        if spilled:
            notes.append(f"{spilled:,} captions have an unquoted {word} and were joined again")
        return "; ".join(notes)

    def is_table(self, path: Path, root: Path, config: DataConfig) -> bool:
        try:
            _understand(path, candidate_folders(path, root, config), config)
        except NotATable:
            return False
        return True


def _names_image(cells: list[str], columns: Columns) -> bool:
    if len(cells) < 2 or len(cells) <= columns.image:
        return False
    name = cells[columns.image].strip(' "')
    return is_image(name) if columns.endings else not isinstance(columns.folder.find(name), str)


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
        if not unfinished or used >= MOST_LINES:
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


def _understand(path: Path, folders: list[ImageFinder], config: DataConfig) -> tuple[str, Columns]:
    """The separator and the columns of a table, from its first rows."""
    if config.separator != AUTO:
        signs = [_WORDS.get(config.separator.lower(), config.separator)]
        if len(signs[0]) != 1 or signs[0] in '"\r\n':
            raise DataError(
                f"data.separator must be one character, not {config.separator!r}.", hint="tab or ;"
            )
    else:
        signs = sorted(
            SEPARATORS.values(),
            key=lambda sign: sign != "\t" if path.suffix.lower() == ".tsv" else 0,
        )
    lines = list(islice(Lines(path), SAMPLE))
    options: list[tuple[float, str, Columns]] = []
    fault: NotATable | None = None
    for sign in signs:
        rows = [cells for _, cells in split_cells(lines, sign)]
        if not rows:
            raise NotATable(
                f"{path.name} is empty.", hint="a table with an image and a caption a line"
            )
        wide = [row for row in rows if len(row) > 1]
        if config.separator == AUTO and len(wide) < len(rows) / 2:
            continue
        widths = sorted(len(row) for row in rows)
        usual = widths[len(widths) // 2]
        even = sum(width == usual for width in widths) / len(widths)
        try:
            columns = guess_columns(wide or rows, folders, config, path.name)
        except NotATable as error:
            fault = fault or error
            continue
        options.append((columns.sure + 2 * even, sign, columns))
    if options:
        best = max(options, key=lambda option: option[0])
        return best[1], best[2]
    if fault:
        raise fault
    raise NotATable(
        f"{path.name} is no table of images and captions: its lines have one column under every separator.",
        hint="an image and a caption a line, or --set data.separator=CHARACTER",
    )

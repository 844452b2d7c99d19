"""Which column of a table names the image, which hold captions and which the split: from names and contents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lapclip.config import AUTO, DataConfig
from lapclip.data.find_images import ImageFinder, best_folder, is_image
from lapclip.data.splits import split_named
from lapclip.errors import DataError, nearest
from lapclip.text import printable

IMAGES = ("filepath", "file_name", "filename", "image", "image_path", "img_path", "image_file", "image_name", "img",
            "picture", "photo", "path", "file", "name", "image_id", "id", "key")  # fmt: skip
CAPTIONS = ("caption", "captions", "text", "sentence", "sentences", "raw", "description", "comment", "alt_text", "alt",
            "prompt", "title", "label", "class", "category", "tag", "tags", "name")  # fmt: skip
SPLITS = ("split", "set", "subset", "partition", "fold")
_COUNTED = re.compile(r"[\s_-]?\d+$")
_NUMBER = re.compile(r"[-+]?[\d.,:/ ]+$")


class NotATable(DataError):
    """A file that could have been a table of images and captions, and is not."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table by their indices."""

    names: Sequence[str]
    image: int
    captions: tuple[int, ...]
    split: int | None
    folder: ImageFinder
    header: bool = True
    endings: bool = True
    """Whether names of images end as files of images do."""
    sure: float = 0.0
    """How well names and contents fit; compares one separator with another."""

    def summary(self) -> str:
        """For the user: which column is what."""
        names = [_printable(name) for name in self.names]
        captions = ", ".join(names[at] for at in self.captions)
        split = f", splits in {names[self.split]}" if self.split is not None else ""
        return f"images in {names[self.image]}, captions in {captions}{split}{self._same_names()}"

    def _same_names(self) -> str:
        """Say which names several columns have, and what becomes of their contents."""
        if not self.header:
            return ""
        tidy = [_tidy(name) for name in self.names]
        notes = ""
        for name, count in Counter(tidy).items():
            if count > 1:
                read = [
                    at
                    for at in (self.image, *self.captions, self.split)
                    if at is not None and tidy[at] == name
                ]
                notes += (
                    f"; {count} columns are called {_printable(name)}, {len(read)} of them are read"
                )
        return notes


def guess_columns(
    rows: Sequence[Sequence[str]], folders: Sequence[ImageFinder], config: DataConfig, what: str
) -> Columns:
    """The columns of a table from its first rows; the very first may be a header. `what` names the table in errors."""
    first = [cell.strip() or f"column{at + 1}" for at, cell in enumerate(rows[0])]
    if len(rows) == 1 and any(_tidy(name) in IMAGES for name in first):
        raise NotATable(f"{what} has a header and no rows.", hint="an image and a caption a line")
    named = guess_named(first, rows[1:] or rows, folders, config, what)
    if len(rows) > 1 and _is_header(rows, named, config):
        return named
    names = [f"column{at + 1}" for at in range(len(first))]
    return replace(guess_named(names, rows, folders, config, what), header=False)


def guess_named(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    folders: Sequence[ImageFinder],
    config: DataConfig,
    what: str,
) -> Columns:
    """The columns of a table whose names are known."""
    columns = [[row[at].strip() for row in rows if at < len(row)] for at in range(len(names))]
    folder, image, sure = _image_column(names, columns, folders, config, what)
    split = split_column(names, columns, image, config, what)
    captions, more = caption_columns(names, columns, {image, split}, config, what)
    endings = any(map(is_image, columns[image]))
    return Columns(names, image, captions, split, folder, endings=endings, sure=sure + more)


def _image_column(names, columns, folders, config, what) -> tuple[ImageFinder, int, float]:
    asked = _asked(names, config.picture_column, "picture_column", what)
    best: tuple[float, ImageFinder, int] | None = None
    for at, cells in enumerate(columns):
        if asked and at not in asked:
            continue
        sample = list(dict.fromkeys(cell for cell in cells if cell))[:24]
        named_so = _share(map(is_image, sample))
        named = _rank(_tidy(names[at]), IMAGES)
        if (
            not asked
            and not named_so
            and (_share(" " in cell for cell in sample) > 0.5 or not sample)
        ):
            continue  # prose; searching every folder for files of such names would take long
        folder, count = best_folder(folders, sample)
        seen = 4 * count / max(1, len(sample)) + 2 * named_so
        # A name alone is not enough: many tables that have nothing to do with images have a column called name or id.
        if (seen or asked) and (best is None or seen + named > best[0]):
            best = seen + named, folder, at
    if best is None:
        raise NotATable(
            f"{what}: no column names images that are there. Its columns: {_listed(names)}.",
            hint="--set data.picture_column=NAME, or --set data.separator=';'",
        )
    return best[1], best[2], best[0]


def split_column(names, columns, image: int, config, what) -> int | None:
    if config.split_column == "":
        return None
    asked = _asked(names, config.split_column, "split_column", what)
    if asked:
        return asked[0]
    for at, cells in enumerate(columns):
        known = _share(split_named(cell) is not None for cell in cells if cell)
        # A caption may be the one word "test"; a column of nothing but such words is no column of captions.
        if at != image and (
            known > 0.5 if _tidy(names[at]) in SPLITS else known == 1 and len(cells) > 2
        ):
            return at
    return None


def caption_columns(
    names, columns, taken: set[int | None], config, what
) -> tuple[tuple[int, ...], float]:
    asked = _asked(names, config.caption_column, "caption_column", what)
    if asked:
        return asked, 2.0
    scores = {at: _prose(names[at], cells) for at, cells in enumerate(columns) if at not in taken}
    best = max(scores, key=lambda at: scores[at], default=None)
    if best is None or scores[best] <= 0:
        raise NotATable(
            f"{what}: no column holds captions. Its columns: {_listed(names)}.",
            hint="--set data.caption_column=NAME, or --set data.separator=';'",
        )
    # caption1, caption2 and so on belong together.
    stem = _COUNTED.sub("", _tidy(names[best]))
    if _COUNTED.search(names[best]) and stem in CAPTIONS:
        alike = [at for at in scores if _COUNTED.sub("", _tidy(names[at])) == stem]
        return tuple(alike), scores[best]
    same_name = [at for at in scores if _tidy(names[at]) == _tidy(names[best])]
    return tuple(same_name), scores[best]


def _prose(name: str, cells: Sequence[str]) -> float:
    cells = [cell for cell in cells if cell]
    known = 2 * _rank(_COUNTED.sub("", _tidy(name)), CAPTIONS)
    if not cells:
        return known
    words = sum(len(cell.split()) for cell in cells) / len(cells)
    files = _share(is_image(cell) or "://" in cell for cell in cells)
    numbers = _share(bool(_NUMBER.match(cell)) for cell in cells)
    score = known + min(words, 12) / 6 - 4 * files
    # A column called caption holds captions, even if they are numbers, unless another one is better.
    return max(score - 4 * numbers, min(score, 0.01 * known))


def _asked(names: Sequence[str], value: str, setting: str, what: str) -> tuple[int, ...]:
    """The indices of the columns that the user names, several between commas; none where it is left to us."""
    if value in (AUTO, ""):
        return ()
    tidy = [_tidy(name) for name in names]
    # Columns have numbers too, for tables without a header.
    tidy += [f"column{at + 1}" for at in range(len(names))]
    columns = [value] if _tidy(value) in tidy else value.split(",")
    for column in columns:
        if _tidy(column) not in tidy:
            raise DataError(
                f"{what}: data.{setting} is {column}, but there is no such column. "
                + nearest(column, map(_printable, names)),
                hint=f"--set data.{setting}=auto",
            )
    found: list[int] = []
    for column in columns:
        found += [at % len(names) for at, name in enumerate(tidy) if name == _tidy(column)]
    return tuple(dict.fromkeys(found))


def _is_header(rows: Sequence[Sequence[str]], named: Columns, config: DataConfig) -> bool:
    """Whether the first row names columns. A row whose image is missing is none, so a reason is asked for: a known
    name, a name that the user set, or a cell unlike all others of the column of images."""
    at, first = named.image, rows[0]
    if at < len(first) and (
        is_image(first[at]) or not isinstance(named.folder.find(first[at]), str)
    ):
        return False
    asked = ",".join((config.picture_column, config.caption_column, config.split_column)).split(",")
    known = {*IMAGES, *CAPTIONS, *SPLITS, *map(_tidy, asked)} - {"", AUTO}
    if any(_tidy(cell) in known or _COUNTED.sub("", _tidy(cell)) in known for cell in first):
        return True
    return at >= len(first) or _form(first[at]) not in {
        _form(row[at]) for row in rows[1:] if at < len(row)
    }


def _form(cell: str) -> str:
    """What a name looks like: letters, digits and signs, whichever and however many there are."""
    return re.sub(r"\d+", "0", re.sub(r"[^\W\d_]+", "a", cell.strip()))


def _tidy(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _rank(name: str, known: Sequence[str]) -> float:
    """1 for the likeliest of the known names, less for the others, 0 for an unknown one."""
    return 1 - known.index(name) / len(known) / 2 if name in known else 0.0


def _share(flags) -> float:
    flags = list(flags)
    return sum(flags) / max(1, len(flags))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(_printable, names[:8])) + (" and more" if len(names) > 8 else "")


def _printable(name: str) -> str:
    """A name from the data on one line: it may hold line ends or colour codes, or be a whole paragraph."""
    return printable(name)[:40]

"""Embeddings by any teacher, from an .npz file: its `pictures` and `captions` name the rows of `image` and `text`."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.dataset import Pairs
from lapclip.errors import DataError, first_line
from lapclip.progress import DataProgress
from lapclip.text import printable

NAMES, TABLES = ("pictures", "captions"), ("image", "text")
MAKE = "docs/distil.md shows how to make one"


class TeacherFile:
    """Teaches what a file says. Rows that the data has no use for are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
            with np.load(path, allow_pickle=False) as file:
                missing = [name for name in (*NAMES, *TABLES) if name not in file]
                if missing:
                    raise DataError(f"{path} has no array {missing[0]}; it has {', '.join(file) or 'none'}.", hint=MAKE)
                self._names = {name: [str(one) for one in file[name]] for name in NAMES}
                self._tables = {name: file[name] for name in TABLES}
        except FileNotFoundError:
            raise DataError(f"There is no file {path}.", hint=MAKE) from None
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            # Names kept as Python objects would have to be unpickled, which runs code.
            why = "its names are pickled; np.array(names, dtype=str) is not" if "pickle" in str(error) else ""
            raise DataError(f"{path} cannot be read: {why or first_line(error)}.", hint=MAKE) from None
        self._check()

    def embed(self, config: DataConfig, pairs: Pairs, progress: DataProgress | None) -> tuple[np.ndarray, np.ndarray]:
        """Unit-length rows for all images and for all captions."""
        if not pairs.names:
            raise DataError(
                f"{self._path} cannot teach about images that are drawn: they have no names.",
                hint="--teacher with a model",
            )
        captions = [caption for options in pairs.captions for caption in options]
        return self._rows("pictures", "image", pairs.names), self._rows("captions", "text", captions)

    def _rows(self, names: str, table: str, wanted: Sequence[str]) -> np.ndarray:
        places = {name: at for at, name in enumerate(self._names[names])}
        missing = list(dict.fromkeys(name for name in wanted if name not in places))
        if missing:
            more = f" and for {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise DataError(
                f'{self._path} has no row in `{names}` for "{printable(missing[0])}"{more}.',
                hint=f"a row for each of the training {names}; {MAKE}",
            )
        rows = self._tables[table][[places[name] for name in wanted]].astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def _check(self) -> None:
        """Refuse what cannot be embeddings, by name."""
        for names, table in zip(NAMES, TABLES, strict=True):
            rows, count = self._tables[table], len(self._names[names])
            if rows.ndim != 2 or len(rows) != count or not np.issubdtype(rows.dtype, np.floating):
                raise DataError(
                    f"{self._path}: `{table}` is {rows.dtype} of shape {rows.shape}; a row of numbers for each of the "
                    f"{count:,} {names} is needed.",
                    hint=MAKE,
                )
            lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
            bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
            if len(bad):
                name = printable(self._names[names][bad[0]])
                raise DataError(f'{self._path}: the row of `{table}` for "{name}" is zero or no number.', hint=MAKE)
        widths = [self._tables[table].shape[1] for table in TABLES]
        if widths[0] != widths[1]:
            raise DataError(
                f"{self._path}: `image` has rows of {widths[0]} numbers and `text` of {widths[1]}; they must have the "
                "same.",
                hint=MAKE,
            )

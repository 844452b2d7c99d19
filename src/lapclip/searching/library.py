"""A folder of images that can be asked: its index, and the model that made it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from lapclip.data.pixels import middle_square
from lapclip.errors import SearchError
from lapclip.searching import model_notes as said
from lapclip.searching import update_index as indexing
from lapclip.searching.encoder import Encoder, open_encoder
from lapclip.searching.index import Entry, Index, index_folder
from lapclip.searching.nearest import nearest
from lapclip.searching.query import excluded, parse, vector_of
from lapclip.searching.update_index import Indexed

__all__ = ["Entry", "Hit", "Library", "open_library"]


class Hit(NamedTuple):
    """An image that was found."""

    number: int
    """Identifies an image in the index, for as long as it is there."""
    path: Path
    score: float


class Library:
    """An opened index and the model that asks it. Threads may share it."""

    def __init__(self, folder: Path, index: Index, encoder: Encoder, indexed: Indexed) -> None:
        self.folder, self.encoder, self.indexed = folder, encoder, indexed
        self._index = index
        self._table, self._vectors = index.snapshot(encoder.identity)
        self._left_out: dict[tuple[str, ...], np.ndarray] = {}

    @property
    def count(self) -> int:
        """Images that can be found."""
        return len(self._table.numbers)

    def find(
        self,
        query: str,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to a text, the nearest first; words after a dash are not wanted."""
        return self._answer(vector_of(parse(query), self.encoder.encode_text), limit, offset, since, exclude)

    def like(
        self,
        number: int,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to one in the index, which is not among them."""
        place = np.flatnonzero(self._table.numbers == number)
        if not len(place):
            return []
        question = np.asarray(self._vectors[self._table.rows[place[0]]], dtype=np.float32)
        return self._answer(question, limit, offset, since, exclude, without=number)

    def like_image(
        self,
        image: str | os.PathLike | Image.Image,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to one from elsewhere: a file, or as it is."""
        question = self.encoder.encode_pixels(middle_square(image, self.encoder.view)[None])[0]
        return self._answer(question, limit, offset, since, exclude)

    def newest(
        self, limit: int = 20, offset: int = 0, since: float | None = None, exclude: Sequence[str] = ()
    ) -> list[Hit]:
        """All images, the newest first. Nothing was asked, so their score is 0."""
        order = np.lexsort((self._table.numbers, -self._table.times))
        order = order[self._kept(since, exclude)[order]][offset : offset + limit]
        return self._hits((number, 0.0) for number in self._table.numbers[order])

    def count_of(self, since: float | None = None, exclude: Sequence[str] = (), without: int | None = None) -> int:
        """Images that are young enough and not left out."""
        return int(self._kept(since, exclude, without).sum())

    @property
    def place(self) -> Path:
        """The folder of the index."""
        return self._index.place

    def entry(self, number: int) -> Entry | None:
        """What the index knows of an image; None where it has none of this number."""
        return self._index.entry(number)

    def path(self, entry: Entry) -> Path:
        """Where an image is."""
        return self.folder / entry.path

    def said(self) -> list[str]:
        """What the model has seen and how well it does, so that nobody expects more of it."""
        return said.sentences(self.encoder.subject)

    def close(self) -> None:
        self._index.close()

    def _answer(
        self,
        question_E: np.ndarray,
        limit: int,
        offset: int,
        since: float | None,
        exclude: Sequence[str],
        without: int | None = None,
    ) -> list[Hit]:
        if not np.isfinite(question_E).all():
            raise SearchError("The model gives no numbers for this: its training broke down.", hint="lapclip doctor")
        numbers, rows, kept = self._table.numbers, self._table.rows, self._kept(since, exclude, without)
        if not kept.all():
            numbers, rows = numbers[kept], rows[kept]
        places, scores = nearest(self._vectors, rows, numbers, question_E, offset + limit)
        return self._hits(zip(numbers[places[offset:]], scores[offset:], strict=True))

    def _kept(self, since: float | None, exclude: Sequence[str], without: int | None = None) -> np.ndarray:
        """Which images are young enough and not left out."""
        kept = np.ones(self.count, bool)
        if since is not None:
            kept &= self._table.times >= since
        if exclude:
            kept &= ~self._excluded(tuple(exclude))
        if without is not None:
            kept &= self._table.numbers != without
        return kept

    def _hits(self, found: Iterable[tuple[int, float]]) -> list[Hit]:
        known = ((self.entry(int(number)), float(score)) for number, score in found)
        return [Hit(entry.number, self.path(entry), score) for entry, score in known if entry]

    def _excluded(self, globs: tuple[str, ...]) -> np.ndarray:
        """Which images globs leave out; kept, because the same ones are asked again."""
        if globs not in self._left_out:
            out = {entry.number for entry in self._index.entries() if excluded(entry.path, globs)}
            self._left_out = {globs: np.isin(self._table.numbers, list(out))}
        return self._left_out[globs]


def open_library(
    folder: Path,
    model: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    device: str = "auto",
    waiting: Callable[[str], None] | None = None,
) -> Library:
    """The images of a folder, those that are new or changed indexed first. `progress` is told how many are done of
    how many; `waiting` why nothing happens."""
    folder = Path(os.path.abspath(folder))
    indexing.check_folder(folder)
    index = Index(index_folder(folder))
    encoder = open_encoder(model, device, index.made_by)
    found = indexing.bring_up_to_date(index, folder, encoder, progress, waiting)
    found.notes[:0] = encoder.notes
    return Library(folder, index, encoder, found)

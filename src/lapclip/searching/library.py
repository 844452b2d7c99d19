"""A folder of images that can be asked: its index, and the model that made it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from lapclip.data.pixels import middle_square
from lapclip.errors import SearchError
from lapclip.progress import Progress, Status
from lapclip.searching.index import Entry, Index, index_folder
from lapclip.searching.indexes import KnownIndex, indexes_of
from lapclip.searching.query import Query, excluded, nearest, parse, vector_of
from lapclip.searching.search_model import (
    SearchModel,
    index_of,
    model_notes,
    open_search_model,
    reading_notes,
)
from lapclip.searching.update_index import IndexUpdate, check_folder, update_index

RANKING_NOTE = "Results are ranked by similarity; nothing here shows whether any of them fits."
AVERAGE_SAMPLE = 1000  # images that the average similarity is taken from

__all__ = ["Answer", "Entry", "Hit", "Library", "open_library"]


class Hit(NamedTuple):
    """An image that was found."""

    number: int
    """Identifies an image in the index, for as long as it is there."""
    path: Path
    score: float
    """Similarity that orders the results: the cosine less the correction for hubness."""
    bar: float | None = None
    """Similarity between an average image of the index (0) and the best result (1). None without a question."""


class Answer(NamedTuple):
    """Images that were found, and how their scores were corrected."""

    hits: list[Hit]
    correction: float | None = None
    """Share of hubness that is subtracted. None if the query is not corrected."""


class Library:
    """An opened index and the model that asks it. Threads may share it."""

    def __init__(self, folder: Path, index: Index, model: SearchModel, update: IndexUpdate) -> None:
        self.folder, self.model, self.update = folder, model, update
        self._index, self._version = index, index.version()
        self._calibration = model.calibration
        bank = self._calibration.digest if self._calibration else None
        self._table, self._vectors = index.snapshot(model.identity, bank)
        self._left_out: dict[tuple[str, ...], np.ndarray] = {}

    @property
    def count(self) -> int:
        """Images that can be found."""
        return len(self._table.numbers)

    def current(self) -> Library:
        """The same with what another process has written into the index since; itself where that is nothing."""
        now = self._index.version()
        if now == self._version:
            return self
        if self.is_removed:
            raise SearchError(
                "The index of this folder was removed; another search of the folder makes it again."
            )
        index = self._index
        if now[:-1] != self._version[:-1]:  # made anew: what was opened is not there any more
            index = Index(index.path)
            index.open()
        return Library(self.folder, index, self.model, self.update)

    @property
    def is_removed(self) -> bool:
        """Whether the index was forgotten since it was opened."""
        return self._index.is_removed

    def find(
        self,
        query: str,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to a text, the nearest first; words after a dash are not wanted."""
        return self.ask(parse(query), limit, offset, since, exclude).hits

    def ask(
        self,
        query: Query,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
        encode_text: Callable[[Sequence[str]], np.ndarray] | None = None,
    ) -> Answer:
        """Return the same, with the correction. `encode_text` may take the place of the model's."""
        question_E = vector_of(query, encode_text or self.model.encode_text)
        return self._answer(question_E, limit, offset, since, exclude, query=query)

    def like(
        self,
        number: int,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to one in the index, which is not among them."""
        (at,) = np.nonzero(self._table.numbers == number)
        if not len(at):
            return []
        question = np.asarray(self._vectors[self._table.rows[at[0]]], dtype=np.float32)
        return self._answer(question, limit, offset, since, exclude, without=number).hits

    def like_image(
        self,
        image: str | os.PathLike | bytes | Image.Image,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to one from elsewhere: a file, or as it is."""
        question = self.model.encode_pixels(middle_square(image, self.model.view)[None])[0]
        return self.near(question, limit, offset, since, exclude)

    def near(
        self,
        question_E: np.ndarray,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """The images nearest to a vector of the model, the nearest first."""
        return self._answer(question_E, limit, offset, since, exclude).hits

    def newest(
        self,
        limit: int = 20,
        offset: int = 0,
        since: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """All images, the newest first. Nothing was asked, so their score is 0."""
        order = np.lexsort((self._table.numbers, -self._table.times))
        order = order[self._allowed(since, exclude)[order]][offset : offset + limit]
        return self._hits((number, 0.0, None) for number in self._table.numbers[order])

    def count_of(
        self, since: float | None = None, exclude: Sequence[str] = (), without: int | None = None
    ) -> int:
        """Images that are young enough and not left out."""
        return int(self._allowed(since, exclude, without).sum())

    @property
    def index_path(self) -> Path:
        """The folder of the index."""
        return self._index.path

    def entry(self, number: int) -> Entry | None:
        """What the index knows of an image; None where it has none of this number."""
        return self._index.entry(number)

    def path(self, entry: Entry) -> Path:
        """Where an image is."""
        return self.folder / entry.path

    def model_notes(self) -> list[str]:
        """What the model has seen, how well it does and how its answers are read: nobody should expect more of it."""
        return [*model_notes(self.model.which), *reading_notes(self.model)]

    def notes_on(self, answer: Answer) -> list[str]:
        """What the model has seen, how well it does, and how these results are ordered."""
        notes = model_notes(self.model.which)
        if answer.correction:
            notes += reading_notes(self.model)
        return [*notes, RANKING_NOTE]

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
        query: Query | None = None,
    ) -> Answer:
        if not np.isfinite(question_E).all():
            raise SearchError(
                "The model gives no numbers for this: its training broke down.",
                hint="lapclip doctor",
            )
        numbers, rows, allowed = (
            self._table.numbers,
            self._table.rows,
            self._allowed(since, exclude, without),
        )
        less = self._penalty if self._is_corrected(query) else None
        average = self._average_score(question_E, less)
        if not allowed.all():
            numbers, rows, less = (
                numbers[allowed],
                rows[allowed],
                less if less is None else less[allowed],
            )
        found, scores = nearest(self._vectors, rows, numbers, question_E, offset + limit, less)
        bars = _bars(scores, average)
        told = zip(numbers[found[offset:]], scores[offset:], bars[offset:], strict=True)
        hits = self._hits(told)
        if less is None or self._calibration is None:
            return Answer(hits)
        return Answer(hits, self._calibration.share)

    @cached_property
    def _sample(self) -> np.ndarray:
        """Places in the table that the average similarity is taken from."""
        return np.unique(
            np.linspace(0, self.count - 1, min(self.count, AVERAGE_SAMPLE)).astype(np.int64)
        )

    @cached_property
    def _mean_vector(self) -> np.ndarray:
        return np.asarray(self._vectors[self._table.rows[self._sample]], np.float32).mean(axis=0)

    def _average_score(self, question_E: np.ndarray, less: np.ndarray | None) -> float:
        """Return the score of an average image of the index."""
        if not self.count:
            return 0.0
        average = float(self._mean_vector @ question_E)
        if less is not None:
            average -= float(less[self._sample].mean())
        return average

    def _is_corrected(self, query: Query | None) -> bool:
        """Return whether the hubness correction was measured for such queries: long ones without unwanted words."""
        if self._calibration is None or query is None or query.unwanted:
            return False
        return self._calibration.corrects(query.wanted)

    @cached_property
    def _penalty(self) -> np.ndarray | None:
        """Amount to subtract from the score of each image. None if hubness is not known."""
        hubness = self._table.hubness
        # Another process may have removed what is known for this bank.
        if self._calibration is None or np.isnan(hubness).all():
            return None
        return self._calibration.penalty(hubness)

    def _allowed(
        self, since: float | None, exclude: Sequence[str], without: int | None = None
    ) -> np.ndarray:
        """Which images are young enough and not left out."""
        allowed = np.ones(self.count, bool)
        if since is not None:
            allowed &= self._table.times >= since
        if exclude:
            allowed &= ~self._excluded(tuple(exclude))
        if without is not None:
            allowed &= self._table.numbers != without
        return allowed

    def _hits(self, found: Iterable[tuple[int, float, float | None]]) -> list[Hit]:
        """Look up images by their numbers; each comes with its score and its bar."""
        hits = []
        for number, score, bar in found:
            entry = self.entry(int(number))
            if entry:
                hits.append(Hit(entry.number, self.path(entry), float(score), bar))
        return hits

    def _excluded(self, globs: tuple[str, ...]) -> np.ndarray:
        """Which images globs leave out; cached, because the same ones are asked again."""
        found = self._left_out.get(globs)
        if found is None:
            out = {entry.number for entry in self._index.entries() if excluded(entry.path, globs)}
            found = np.isin(self._table.numbers, list(out))
            self._left_out = {globs: found}  # another thread may replace it at any moment
        return found


def _bars(scores: np.ndarray, average: float) -> list[float]:
    """Place scores, the best first, between the average score (0) and the best one (1)."""
    if not len(scores):
        return []
    span = max(float(scores[0]) - average, 1e-6)
    return [min(max((float(score) - average) / span, 0.0), 1.0) for score in scores]


def open_library(
    folder: Path,
    model: str | None = None,
    progress: Progress | None = None,
    *,
    device: str = "auto",
    waiting: Status | None = None,
) -> Library:
    """The images of a folder, those that are new or changed indexed first. `waiting` is told why nothing happens.
    Without a model it is the one that made the index of the folder, else the best (`lapclip.which_model`)."""
    folder = Path(os.path.abspath(folder))
    check_folder(folder)
    return library_of(
        folder, open_search_model(model, device, indexes_of(folder)), progress, waiting
    )


def library_of(
    folder: Path,
    model: SearchModel,
    progress: Progress | None = None,
    waiting: Status | None = None,
) -> Library:
    """The same with a model that is open already."""
    check_folder(folder)
    index = Index(index_path(folder, model, indexes_of(folder)))
    update = update_index(index, folder, model, progress, waiting)
    update.notes[:0] = model.notes
    return Library(folder, index, model, update)


def index_path(folder: Path, model: SearchModel, known: Sequence[KnownIndex]) -> Path:
    """Where the index of a folder by a model lies, or is to lie."""
    found = index_of(model, known)
    return found.path if found else index_folder(folder) / model.identity

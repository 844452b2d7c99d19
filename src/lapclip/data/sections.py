"""Sections of data that is read in sequence: one run of rows for each shard of a batch.

A process that computes a shard reads the files of its section and no others. Data that is not read
in sequence, and a batch of one shard, have one section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lapclip.data.dataset import Pairs

WINDOW_ROWS = 4096  # rows that are shuffled among each other
BLOCK_ROWS = (
    256  # rows that stay neighbors until then, because reading neighbors together is faster
)


def deal(rows: int, shards: int) -> tuple[np.ndarray, ...]:
    """Return the rows of each shard of a batch, dealt in turn.

    Rows are sorted by the length of their captions, so all shards cost alike.
    """
    return tuple(np.arange(shard, rows, shards) for shard in range(min(shards, rows)))


@dataclass(frozen=True)
class Sections:
    """The sections of a split."""

    batch_size: int
    batches: int
    """Batches of an epoch."""
    first: Sequence[int]
    """First row of each section, and the number of rows."""

    @classmethod
    def of(cls, pairs: Pairs, batch_size: int, shards: int) -> Sections:
        """Return sections of about equal length.

        They end where a file ends, if that leaves each of them enough rows for all batches of an
        epoch. Otherwise a file is divided, so that an epoch leaves out no more rows than without
        sections.
        """
        count, batches = len(pairs), len(pairs) // batch_size
        sections = min(shards, batch_size) if pairs.sequential and shards > 1 else 1
        needed = [_rows_before(number, batches, batch_size, sections) for number in range(sections)]
        file_ends = np.arange(0)
        if pairs.files is not None:
            file_ends = np.flatnonzero(np.diff(pairs.files)) + 1
        first = [0]
        for number in range(1, sections):
            least, most = first[-1] + needed[number - 1], count - sum(needed[number:])
            even = min(max(count * number // sections, least), most)
            possible = file_ends[(file_ends >= least) & (file_ends <= most)]
            nearest = even
            if len(possible):
                nearest = int(possible[np.abs(possible - even).argmin()])
            first.append(nearest)
        return cls(batch_size, batches, [*first, count])

    def __len__(self) -> int:
        return len(self.first) - 1

    def rows_before(self, section: int, batch: int) -> int:
        """Return how many rows of a section come before a batch of an epoch. Batches count from
        0."""
        return _rows_before(section, batch, self.batch_size, len(self))

    def sizes(self, batch: int) -> list[int]:
        """Return how many rows of each section a batch has."""
        return [
            self.rows_before(at, batch + 1) - self.rows_before(at, batch) for at in range(len(self))
        ]

    def numbers(self, batch: int) -> np.ndarray:
        """Return the section of each row of a batch."""
        return np.repeat(np.arange(len(self)), self.sizes(batch))

    def divide(self, batch: int, order: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the rows of each section of a batch that was sorted in this order."""
        section_of_row = self.numbers(batch)[order]
        return tuple(np.flatnonzero(section_of_row == section) for section in range(len(self)))

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Draw the rows of an epoch: batch after batch, and in each of them section after section.

        All sections are drawn, whichever of them this process reads, so that all processes have the
        same order.
        """
        orders = [
            first + _shuffle_nearby(last - first, draw) for first, last in pairwise(self.first)
        ]
        if len(self) == 1:
            return orders[0]
        batch_of_row = [
            self._batch_of(section, np.arange(len(order))) for section, order in enumerate(orders)
        ]
        by_batch = np.argsort(np.concatenate(batch_of_row), kind="stable")
        return np.concatenate(orders)[by_batch]

    def count_after(self, section: int, batch: int) -> int:
        """Return how many rows of a section come after a batch, those left over included."""
        return self.first[section + 1] - self.first[section] - self.rows_before(section, batch + 1)

    def index_after(self, section: int, batch: int, number: int) -> int:
        """Return where `order` puts one of the rows that come after a batch."""
        row = self.rows_before(section, batch + 1) + number
        its_batch = int(self._batch_of(section, row))
        if its_batch < self.batches:
            before = sum(self.sizes(its_batch)[:section])
        else:
            used = sum(self.rows_before(at, its_batch) for at in range(section))
            before = self.first[section] - used
        return its_batch * self.batch_size + before + row - self.rows_before(section, its_batch)

    def _batch_of(self, section: int, row: Any) -> Any:
        """Return the batch of a row of a section. Rows left over come after the last batch."""
        batch = -(-((row + 1) * len(self) - section) // self.batch_size) - 1
        return np.minimum(batch, self.batches)


def _rows_before(section: int, batch: int, batch_size: int, sections: int) -> int:
    # Summed over all sections these are the rows of all batches before. A remainder goes round.
    return (batch * batch_size + section) // sections


def _shuffle_nearby(count: int, draw: np.random.Generator) -> np.ndarray:
    """Draw an order of rows in which neighbors stay close."""
    # Blocks in a new order, then each row delayed by a random number of rows: a buffer that is
    # drawn from. Rows that would come after the end come first, so the first and last batches are
    # as mixed as the others.
    row = np.arange(count)
    block = draw.permutation(-(-count // BLOCK_ROWS))[row // BLOCK_ROWS]
    delayed = block * BLOCK_ROWS + row % BLOCK_ROWS + draw.random(count) * WINDOW_ROWS
    return np.argsort(delayed % count, kind="stable")

"""Rows of different lengths in one array, so that a batch of them is taken without a loop: while Python loops, no other
thread of the process runs, and one of them is to keep an accelerator busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Ragged(Sequence[np.ndarray]):
    """Several values for each row, such as its tokens or their features; or one for each."""

    values: np.ndarray
    """Of all rows, one row's after the other's."""
    first_N: np.ndarray | None
    """Where the values of each row begin, and where the last one's end; None where each row has one."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> Ragged:
        """Rows that lie apart, put together."""
        values = np.concatenate(rows) if len(rows) else np.zeros(0, dtype=np.int32)
        return cls(values, np.cumsum([0, *map(len, rows)]))

    def __len__(self) -> int:
        return len(self.values) if self.first_N is None else len(self.first_N) - 1

    def __getitem__(self, row: Any) -> Any:
        """The values of one row."""
        row = range(len(self))[row]  # counts from the end, or is refused
        return (
            self.values[row]
            if self.first_N is None
            else self.values[self.first_N[row] : self.first_N[row + 1]]
        )

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """How many values each of some rows has."""
        if self.first_N is None:
            return np.ones(len(rows), dtype=np.int64)
        return self.first_N[rows + 1] - self.first_N[rows]

    def joined(self, rows: np.ndarray) -> np.ndarray:
        """The values of some rows, one row's after the other's."""
        if self.first_N is None:
            return self.values[rows]
        lengths = self.lengths(rows)
        before = np.cumsum(lengths) - lengths
        return self.values[
            np.arange(lengths.sum()) + np.repeat(self.first_N[rows] - before, lengths)
        ]

    def padded(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Some rows, padded with zeros to a length where they have several values."""
        if self.first_N is None:
            return self.values[rows]
        found = np.zeros((len(rows), length, *self.values.shape[1:]), dtype=self.values.dtype)
        found[np.arange(length) < self.lengths(rows)[:, None]] = self.joined(rows)
        return found

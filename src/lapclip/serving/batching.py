"""Rows of many callers, joined into batches while the engine works.

One thread computes. While it does, rows wait; when it is free it takes the row that has waited longest, and with it as
many others of the same shape as one batch holds. So nobody waits for company where the engine is idle, and batches grow
by themselves under load. What is cancelled or too late is dropped before it costs anything. If a batch fails, its rows
are computed one by one, so that only the row that is at fault fails.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lapclip.errors import first_line
from lapclip.serving.refusals import Fault, Unavailable

TOWERS: tuple[str, ...] = ("image", "text")
SMOOTHING = 0.1
"""The weight of the newest batch in the running mean of what a row costs."""


class BatchEngine(Protocol):
    """What the batcher needs of an engine."""

    def embed(self, tower: str, rows: np.ndarray) -> np.ndarray:
        """Unit-length vectors of one batch."""
        ...

    def largest_batch(self, tower: str) -> int:
        """Rows at once beyond which nothing is gained."""
        ...

    def seconds_per_row(self, tower: str) -> float:
        """What a row cost when the engine was measured."""
        ...


@dataclass(slots=True)
class Row:
    """One image or text on its way through the engine."""

    tower: str
    values: np.ndarray
    """Pixels (side, side, 3) or tokens (length)."""
    future: asyncio.Future[np.ndarray]
    deadline: float
    """By `time.monotonic`."""
    first: bool = False
    """Whether it goes before all others: a test of the model must not wait behind the work of callers."""
    queued: float = field(default_factory=time.monotonic)

    @property
    def shape(self) -> tuple[str, int]:
        """Rows of one shape can share a batch. Texts of one padded length: nothing is computed for padding alone."""
        return self.tower, len(self.values)


@dataclass(frozen=True)
class BatchReport:
    """What happened to one batch, for the metrics."""

    tower: str
    size: int
    engine_seconds: float
    queue_seconds: list[float]
    failed: int


class Batcher:
    """Takes rows from any thread, and resolves their futures in the loop they belong to."""

    def __init__(
        self, engine: BatchEngine, report: Callable[[BatchReport], None] = lambda report: None
    ) -> None:
        self._engine, self._report = engine, report
        self._waiting: dict[tuple[str, int], deque[Row]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_row = {tower: engine.seconds_per_row(tower) for tower in TOWERS}
        self._thread = threading.Thread(target=self._work, name="lapclip-engine", daemon=True)
        self._thread.start()

    def submit(self, row: Row) -> None:
        """Have a row computed; `row.future` gets its vector, `Unavailable` or `Fault`."""
        with self._changed:
            if self._closing:
                _settle(row, Unavailable("The model has just been replaced."))
                return
            rows = self._waiting.setdefault(row.shape, deque())
            if row.first:
                rows.appendleft(row)
            else:
                rows.append(row)
            self._changed.notify()

    def seconds_of(self, tower: str) -> float:
        """What a row costs now, by the latest batches."""
        return self._seconds_per_row[tower]

    def close(self) -> None:
        """Compute what waits, take nothing new, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if batch:
                self._compute(batch)

    def _next(self) -> list[Row] | None:
        """The next batch; an empty one where all that waited was given up, None at the end."""
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait()
            shape = min(self._waiting, key=lambda shape: self._rank(self._waiting[shape][0]))
            rows, batch, now = self._waiting[shape], [], time.monotonic()
            while rows and len(batch) < self._engine.largest_batch(shape[0]):
                row = rows.popleft()
                if row.future.cancelled():
                    continue
                if row.deadline < now:
                    _settle(
                        row,
                        Unavailable("The deadline passed while the request waited for the engine."),
                    )
                    continue
                batch.append(row)
            if not rows:
                del self._waiting[shape]
            return batch

    @staticmethod
    def _rank(row: Row) -> tuple[bool, float]:
        return not row.first, row.queued

    def _compute(self, batch: list[Row]) -> None:
        began, tower = time.monotonic(), batch[0].tower
        vectors = self._attempt(batch)
        ended = time.monotonic()
        if (
            len(batch) >= self._engine.largest_batch(tower) / 2
        ):  # small ones cost more a row, and are soon over
            latest = (ended - began) / len(batch)
            self._seconds_per_row[tower] += SMOOTHING * (latest - self._seconds_per_row[tower])
        _settle_all(batch, vectors)
        failed = sum(isinstance(vector, Exception) for vector in vectors)
        self._report(
            BatchReport(
                tower, len(batch), ended - began, [began - row.queued for row in batch], failed
            )
        )

    def _attempt(self, batch: list[Row]) -> list[np.ndarray | Exception]:
        """A vector for each row, or why there is none."""
        try:
            vectors = self._engine.embed(batch[0].tower, np.stack([row.values for row in batch]))
            if len(vectors) != len(batch):
                raise ValueError(f"{len(vectors)} vectors for {len(batch)} rows")
        except (
            Exception
        ) as error:  # whatever the engine stumbles on, the rows beside it are not at fault
            if len(batch) == 1:
                return [Fault(f"The model failed on this input: {first_line(error)}.")]
            return [self._attempt([row])[0] for row in batch]
        good: list[bool] = np.asarray(np.isfinite(vectors).all(axis=1)).tolist()
        return [
            np.asarray(vector, np.float32)
            if fine
            else Fault("The model gives no numbers for this input.")
            for vector, fine in zip(vectors, good, strict=True)
        ]


def _settle(row: Row, result: np.ndarray | Exception) -> None:
    _settle_all([row], [result])


def _settle_all(rows: list[Row], results: list[np.ndarray | Exception]) -> None:
    """Hand results over in the loop that waits for them: one call for the batch of one loop."""

    def hand_over() -> None:
        for row, result in zip(rows, results, strict=True):
            if row.future.done():  # its caller went away
                continue
            if isinstance(result, Exception):
                row.future.set_exception(result)
            else:
                row.future.set_result(result)

    try:
        rows[0].future.get_loop().call_soon_threadsafe(hand_over)
    except RuntimeError:  # the loop has ended, and with it everyone who waited
        pass

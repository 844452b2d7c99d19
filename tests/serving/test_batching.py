"""Rows of many callers in one engine: joined, kept apart where one fails, and dropped where nobody waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lapclip.serving.batching import Batcher, BatchReport, Row
from lapclip.serving.refusals import Fault, Unavailable


class Doubling:
    """An engine whose vector of a row is known; it waits until it is let go, and fails on a row that begins with 13."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.batches: list[int] = []

    def embed(self, tower: str, rows: np.ndarray) -> np.ndarray:
        self.go.wait(5)
        self.batches.append(len(rows))
        if (rows[:, 0] == 13).any():
            raise ValueError("no thirteens")
        return rows.astype(np.float32) * (2 if tower == "image" else 3)

    def largest_batch(self, tower: str) -> int:
        return 4

    def seconds_per_row(self, tower: str) -> float:
        return 0.001


def row(value: float, tower: str = "image", seconds: float = 5.0, length: int = 2) -> Row:
    future = asyncio.get_running_loop().create_future()
    return Row(tower, np.full(length, value), future, time.monotonic() + seconds)


async def started(engine: Doubling, reports: list[BatchReport]) -> Batcher:
    """A batcher whose engine is busy with a first row."""
    batcher = Batcher(engine, reports.append)
    batcher.submit(row(0))
    while any(tower == "image" for tower, _ in batcher._waiting):
        await asyncio.sleep(0.001)
    return batcher


def test_what_waits_is_joined_and_everyone_gets_their_own() -> None:
    async def check() -> None:
        engine, reports = Doubling(), list[BatchReport]()
        batcher = await started(engine, reports)
        rows = [row(value, "text" if value % 2 else "image") for value in range(1, 9)]
        for each in rows:
            batcher.submit(each)
        engine.go.set()
        vectors = await asyncio.gather(*(each.future for each in rows))
        assert [vector[0] for vector in vectors] == [3, 4, 9, 8, 15, 12, 21, 16]
        assert engine.batches == [1, 4, 4]
        batcher.close()
        assert await asyncio.to_thread(batcher.join, 5)
        assert [(report.tower, report.size) for report in reports] == [
            ("image", 1),
            ("text", 4),
            ("image", 4),
        ]

    asyncio.run(check())


def answers_of(engine: Doubling, make_rows: Callable[[], list[Row]]) -> list[Any]:
    """The vectors or faults of rows that wait together."""

    async def ask() -> list[Any]:
        batcher = await started(engine, [])
        rows = make_rows()
        for each in rows:
            batcher.submit(each)
        engine.go.set()
        found = await asyncio.gather(*(each.future for each in rows), return_exceptions=True)
        batcher.close()
        return found

    return asyncio.run(ask())


def test_rows_of_another_length_go_by_themselves() -> None:
    engine = Doubling()
    found = answers_of(engine, lambda: [row(1, "text", length=size) for size in (8, 16, 8)])
    assert [len(vector) for vector in found] == [8, 16, 8]
    assert engine.batches == [1, 2, 1]


def test_a_row_that_fails_fails_alone() -> None:
    found = answers_of(Doubling(), lambda: [row(value) for value in (1, 13, np.nan, 4)])
    assert [isinstance(each, Fault) for each in found] == [False, True, True, False]


def test_what_nobody_waits_for_is_not_computed() -> None:
    async def check() -> None:
        engine = Doubling()
        batcher = await started(engine, [])
        given_up, late, wanted = row(1), row(2, seconds=-1), row(3)
        given_up.future.cancel()
        for each in (given_up, late, wanted):
            batcher.submit(each)
        engine.go.set()
        assert (await wanted.future)[0] == 6
        assert engine.batches == [1, 1]
        with pytest.raises(Unavailable):
            await late.future
        batcher.close()
        after = row(5)
        batcher.submit(after)
        with pytest.raises(Unavailable):
            await after.future

    asyncio.run(check())

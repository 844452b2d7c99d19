"""Work that threads do ahead of whoever wants its results: in one thread, and in more where that is too slow.

More threads than are needed cost the model time where it computes on the same cores.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

PERIOD = 0.5
"""Seconds after which it is looked at whether results were waited for."""
PATIENCE = 0.05
"""Share of the time that may be spent waiting before more threads are taken."""
Item = TypeVar("Item")
Made = TypeVar("Made")


def made_ahead(make: Callable[[Item], Made], items: Iterable[Item], ahead: int, most_threads: int) -> Iterator[Made]:
    """What is made of each item, in their order, up to `ahead` of them before they are wanted."""
    turns, threads = threading.Semaphore(1), 1

    def in_turn(item: Item) -> Made:
        with turns:
            return make(item)

    pool = ThreadPoolExecutor(most_threads, thread_name_prefix="lapclip-reading")
    waiting: deque[Future[Made]] = deque()
    source, waited, worked = iter(items), 0.0, 0.0
    try:
        while True:
            while len(waiting) < ahead and (item := next(source, waiting)) is not waiting:
                waiting.append(pool.submit(in_turn, item))  # type: ignore[arg-type]
            if not waiting:
                return
            began = time.monotonic()
            made = waiting.popleft().result()
            ready = time.monotonic()
            yield made
            worked += time.monotonic() - ready
            if worked > 0.01:  # else nobody has worked yet, and the first results are always waited for
                waited += ready - began
            if waited + worked > PERIOD:
                if waited > PATIENCE * (waited + worked) and threads < most_threads:
                    more = min(threads, most_threads - threads)
                    turns.release(more)
                    threads += more
                waited = worked = 0.0
    finally:
        pool.shutdown(cancel_futures=True)

"""What the loop works on, step after step: batches that threads prepare, and where that can be had already on their way
to the device when the loop asks for them, so that its own thread only launches."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from lapclip.data.batches import Batch, BatchPlan, prefetch
from lapclip.training.inputs import Sent
from lapclip.training.step import TrainStep


@contextmanager
def feed(
    plan: BatchPlan, step: TrainStep, first: int, last: int, threads: int = 1
) -> Iterator[Iterator[Batch | Sent]]:
    """The batches of steps first to last, in order, for a step that takes each before it asks for the next."""
    with closing(prefetch(plan, first, last, threads)) as batches:
        if not step.sends_ahead or first > last:
            yield batches
            return
        with closing(_sent_ahead(batches, step, first, last)) as sent:
            yield sent


def ready(step: TrainStep, batch: Batch, number: int) -> Batch | Sent:
    """A batch to be timed with, again and again: as training hands it over, which is on the device where batches are
    sent ahead."""
    return step.send(batch, number) if step.sends_ahead else batch


def _sent_ahead(
    batches: Iterator[Batch], step: TrainStep, first: int, last: int
) -> Generator[Sent]:
    """The next batch is sent by another thread while the loop launches the step before it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="lapclip-sending")
    try:
        coming = pool.submit(lambda: step.send(next(batches), first))
        for number in range(first, last + 1):
            now = coming
            if number < last:
                # Not before the loop has taken the last step: only then can the memory of its batch be given away.
                coming = pool.submit(lambda next_one=number + 1: step.send(next(batches), next_one))
            yield now.result()
    finally:
        pool.shutdown(cancel_futures=True)

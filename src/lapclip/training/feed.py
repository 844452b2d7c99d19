"""The batches of a run: threads prepare them, and bring them to the device ahead of the step that takes them."""

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
    """Yield the batches of steps first to last. The step must take each before the next is requested."""
    with closing(prefetch(plan, first, last, threads)) as batches:
        if not step.sends_ahead or first > last:
            yield batches
            return
        with closing(_send_ahead(batches, step, first, last)) as sent:
            yield sent


def ready(step: TrainStep, batch: Batch, number: int) -> Batch | Sent:
    """Return a batch as training passes it to the step, to time the step with it again and again."""
    return step.send(batch, number) if step.sends_ahead else batch


def _send_ahead(
    batches: Iterator[Batch], step: TrainStep, first: int, last: int
) -> Generator[Sent]:
    """Send the next batch from another thread while the loop launches the step before it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="lapclip-sending")
    try:
        coming = pool.submit(lambda: step.send(next(batches), first))
        for number in range(first, last + 1):
            now = coming
            if number < last:
                # Not before the loop has taken the last step: only then may its memory be reused.
                coming = pool.submit(lambda next_one=number + 1: step.send(next(batches), next_one))
            yield now.result()
    finally:
        pool.shutdown(cancel_futures=True)

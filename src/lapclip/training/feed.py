"""Batches of a run, prepared by threads and sent to the device ahead of their step."""

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
    """Provide the batches of steps first to last. Each step must be launched before the next
    request."""
    with closing(prefetch(plan, first, last, threads)) as batches:
        if not step.sends_ahead or first > last:
            yield batches
            return
        with closing(_send_ahead(batches, step, first, last)) as sent:
            yield sent


def ready(step: TrainStep, batch: Batch, number: int) -> Batch | Sent:
    """Return a batch as training passes it to the step, to time the step with it again and
    again."""
    return step.send(batch, number) if step.sends_ahead else batch


def _send_ahead(
    batches: Iterator[Batch], step: TrainStep, first: int, last: int
) -> Generator[Sent]:
    """Yield batches that another thread sends to the device while earlier steps are computed."""

    def send_next(number: int) -> Sent:
        return step.send(next(batches), number)

    pool = ThreadPoolExecutor(1, thread_name_prefix="lapclip-sending")
    try:
        sending = pool.submit(send_next, first)
        for number in range(first + 1, last + 1):
            # Two blocks of memory take turns. This batch takes the one of step `number - 2`, which
            # the loop has launched, because it requests the batch of the step after it.
            next_sending = pool.submit(send_next, number)
            yield sending.result()
            sending = next_sending
        yield sending.result()
    finally:
        pool.shutdown(cancel_futures=True)

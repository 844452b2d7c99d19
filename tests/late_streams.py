"""Streams and events of a device, simulated as late as they may be: nothing runs until somebody waits for it, and what
may overtake does. So memory that is written too early shows as wrong numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from lapclip.machine.transfer import PinnedTransfer


class LateStream:
    """Work that is done in its order, and not before it has to be."""

    def __init__(self, runtime: LateRuntime) -> None:
        self._runtime, self.queue = runtime, []
        runtime.streams.append(self)

    def enqueue(self, work: Callable[[], object]) -> None:
        self.queue.append((None, work))

    def wait_event(self, event: LateEvent) -> None:
        if event.mark is not None:
            self.queue.append((event.mark, lambda: None))

    def run_next(self) -> bool:
        """Do the first piece of work, unless it waits for another stream that has not come so far."""
        if not self.queue or (self.queue[0][0] is not None and not self.queue[0][0].reached):
            return False
        self.queue.pop(0)[1]()
        return True


class LateEvent:
    """A mark in a stream; one that was never recorded is waited for by nobody."""

    def __init__(self, runtime: LateRuntime) -> None:
        self._runtime, self.mark = runtime, None

    def record(self, stream: LateStream) -> None:
        self.mark = mark = SimpleNamespace(reached=False)
        stream.enqueue(lambda: setattr(mark, "reached", True))

    def synchronize(self) -> None:
        while self.mark is not None and not self.mark.reached:
            self._runtime.progress()


class LateRuntime:
    """What `torch.cuda` offers, with streams that are late. `order` decides which of those that may run is next."""

    def __init__(self, order: random.Random) -> None:
        self.streams: list[LateStream] = []
        self._order = order
        self._current = self.Stream()

    def Stream(self) -> LateStream:
        return LateStream(self)

    def Event(self) -> LateEvent:
        return LateEvent(self)

    def current_stream(self) -> LateStream:
        return self._current

    def current_device(self) -> int:
        return 0

    def device(self, index: int) -> nullcontext:
        return nullcontext()

    @contextmanager
    def stream(self, stream: LateStream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def progress(self) -> bool:
        streams = list(self.streams)
        self._order.shuffle(streams)
        return any(stream.run_next() for stream in streams)

    def synchronize(self) -> None:
        while self.progress():
            pass


class LateTransfer(PinnedTransfer):
    """The real one, but for copies, which wait in the simulated stream."""

    def __init__(self, runtime: LateRuntime) -> None:
        super().__init__(torch.device("cpu"), runtime)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._module.current_stream().enqueue(lambda: target.copy_(source))

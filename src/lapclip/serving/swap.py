"""A newer model in place of the one that is served: opened and checked beside it, and swapped between two requests.

A thread looks for a reason: a file of the model that has changed (`--follow`), or SIGHUP.
What fails its check is not taken; the old model goes on.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from lapclip.errors import LapclipError, first_line
from lapclip.serving.choose_engine import (
    EngineRequest,
    check_finite,
    open_engine,
    open_same_engine,
)
from lapclip.serving.engine import Engine
from lapclip.serving.model_forms import Stamps
from lapclip.serving.refusals import Unavailable
from lapclip.serving.service import ServedModel, Service
from lapclip.which_model import WhichModel

EVERY = 1.0
"""Seconds between two looks."""
SWAP_SECONDS = 60.0
"""The longest wait for the loop that answers requests."""
RETRY = 30.0
"""Seconds after which `--follow` tries a model again that was refused because the server was too busy to check it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a search for a newer model."""

    state: str
    """taken, same or refused."""
    reason: str


class Swapper:
    """Looks for newer models while a server runs."""

    def __init__(
        self,
        service: Service,
        which: WhichModel,
        make: Callable[[Engine], ServedModel],
        opened: Stamps,
        *,
        asked: EngineRequest = EngineRequest(),
        follow: bool = False,
        log: Callable[[str], None] = lambda line: None,
        every: float = EVERY,
        retry: float = RETRY,
    ) -> None:
        """`opened` are the stamps from before the served model was opened."""
        self._service, self._which, self._make = service, which, make
        self._asked, self._follow, self._log, self._every, self._retry = (
            asked,
            follow,
            log,
            every,
            retry,
        )
        self._opened = opened
        """The files that the served model was opened from."""
        self._tried = self._seen = opened
        """The files that were tried last, and those that were seen last."""
        self._retry_at = math.inf
        """When to try the same files once more, by `time.monotonic`."""
        self._fault = ""
        self._retiring: set[asyncio.Task[None]] = set()
        self._hangup, self._wake, self._over = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="lapclip-follow", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on; `loop` is where requests are answered."""
        self._loop = loop
        self._thread.start()

    def ask(self) -> None:
        """Look for a newer model soon. Safe in a signal's handler."""
        self._hangup.set()
        self._wake.set()

    def stop(self) -> None:
        """Take no model any more."""
        self._over.set()
        self._wake.set()

    def take_newer(self) -> Outcome:
        """Open, check and swap in the model as it is on disk now, if it is another one than the served one."""
        old, new = self._service.model, None
        try:
            now = Stamps.of(
                self._which
            )  # before anything is read: what is saved meanwhile is newer
            self._tried, self._retry_at = now, math.inf
            engine = self._open(now, old.engine)
            if engine is None or (engine.fingerprint, engine.name) == (
                old.fingerprint,
                old.engine.name,
            ):
                self._opened = now
                return Outcome("same", f"the model is the same as before, {old.fingerprint}")
            check_finite(engine)
            new = self._make(engine)
            if (fault := asyncio.run(self._service.test(new))) is not None:
                raise fault
            self._swap(new)
        except Exception as error:  # whatever is wrong with the new model, the old one is served
            if new is not None and new is not self._service.model:
                new.batcher.close()
            if isinstance(error, Unavailable):
                self._retry_at = time.monotonic() + self._retry
            self._service.metrics.swapped("refused")
            return Outcome("refused", f"not taken: {_reason(error)}")
        self._opened = now
        self._service.metrics.swapped("taken")
        return Outcome(
            "taken", f"serving {new.fingerprint} by {engine.name} in place of {old.fingerprint}"
        )

    def _swap(self, new: ServedModel) -> None:
        """In the loop that answers requests, where no request is between meeting a model and being counted by it."""
        done: Future[None] = Future()

        def swap() -> None:
            if not done.set_running_or_notify_cancel():  # given up
                return
            try:
                task = asyncio.ensure_future(self._service.retire(self._service.replace(new)))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(swap)
        try:
            done.result(SWAP_SECONDS)
        except TimeoutError:
            if done.cancel():
                raise Unavailable("The server was too busy to swap models.") from None
            done.result()  # it has just begun

    def _open(self, now: Stamps, old: Engine) -> Engine | None:
        """An engine for what is on disk; None where that is what the served model was opened from."""
        if now.model and now == self._opened:
            return None
        # Where only an export is new, it may be faster, which measuring tells.
        is_newer = not now.model or now.model != self._opened.model
        engine = open_same_engine(self._which, old) if is_newer else None
        return engine or open_engine(self._which, self._asked)

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._look()
            except Exception as error:  # nothing but `stop` ends this thread
                fault, self._fault = self._fault, _reason(error)
                if fault != self._fault:  # each look may find the same
                    with suppress(Exception):
                        self._log(f"no newer model can be looked for: {self._fault}")
            self._wake.wait(self._every)
            self._wake.clear()

    def _look(self) -> None:
        """Take a newer model, if there is a reason to."""
        asked = self._hangup.is_set()
        self._hangup.clear()
        if not asked and not (self._follow and self._has_changed()):
            return
        outcome = self.take_newer()
        if asked or outcome.state != "same":
            self._log(outcome.reason)

    def _has_changed(self) -> bool:
        """Whether files of the model are others than those that were tried last, and have come to rest; or are to be
        tried once more."""
        before, self._seen = self._seen, Stamps.of(self._which)
        to_try = self._seen != self._tried or time.monotonic() >= self._retry_at
        return to_try and self._seen == before


def _reason(error: Exception) -> str:
    return (
        error.message
        if isinstance(error, LapclipError)
        else f"{type(error).__name__}: {first_line(error)}"
    )

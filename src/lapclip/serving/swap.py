"""A newer model in place of the one that is served: opened and checked beside it, and swapped between two requests.

A thread looks for a reason: a file of the model that has changed (`--follow`), SIGHUP, or `lapclip serve --reload`.
What fails its check is not taken; the old model goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lapclip.errors import LapclipError, first_line
from lapclip.serving import running
from lapclip.serving.choose_engine import Asked, check_numbers, files_stamp, open_engine, same_engine, source_stamp
from lapclip.serving.engine import Engine
from lapclip.serving.service import ServedModel, Service
from lapclip.which_model import WhichModel

EVERY = 1.0
"""Seconds between two looks."""
SWAP_SECONDS = 60.0
"""The longest wait for the loop that answers requests."""


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
        *,
        asked: Asked = Asked(),
        follow: bool = False,
        log: Callable[[str], None] = lambda line: None,
        every: float = EVERY,
    ) -> None:
        self._service, self._which, self._make = service, which, make
        self._asked, self._follow, self._log, self._every = asked, follow, log, every
        self._stamp = self._seen = source_stamp(which)
        self._model_stamp = files_stamp(which)
        self._hangup, self._wake, self._over = threading.Event(), threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="lapclip-follow", daemon=True)
        self.server: running.RunningServer | None = None
        """This server, as others find it."""

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
        """Open, check and swap in the model as it is on disk now, if it is another one."""
        old = self._service.model
        try:
            engine = self._open(old.engine)
            if engine is None or (engine.fingerprint, engine.name) == (old.fingerprint, old.engine.name):
                return Outcome("same", f"the model is the same as before, {old.fingerprint}")
            check_numbers(engine)
            new = self._make(engine)
            if (fault := asyncio.run(self._service.test(new))) is not None:
                new.batcher.close()
                raise fault
        except Exception as error:  # whatever is wrong with the new model, the old one is served
            reason = (
                error.message if isinstance(error, LapclipError) else f"{type(error).__name__}: {first_line(error)}"
            )
            self._service.metrics.swapped("refused")
            return Outcome("refused", f"not taken: {reason}")
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._swap(new), self._loop).result(SWAP_SECONDS)
        self._service.metrics.swapped("taken")
        return Outcome("taken", f"serving {new.fingerprint} by {engine.name} in place of {old.fingerprint}")

    async def _swap(self, new: ServedModel) -> None:
        """In the loop that answers requests, where no request is between meeting a model and being counted by it."""
        old = self._service.replace(new)
        self._retiring = asyncio.ensure_future(self._service.retire(old))

    def _open(self, old: Engine) -> Engine | None:
        """An engine for what is on disk; None where nothing of it has changed since the last look."""
        model, source = files_stamp(self._which), source_stamp(self._which)
        if source and source == self._stamp:
            return None
        # Where only an export is new, it may be faster, which measuring tells.
        engine = same_engine(self._which, old) if model != self._model_stamp else None
        self._stamp, self._model_stamp = source, model
        return engine or open_engine(self._which, self._asked)

    def _watch(self) -> None:
        while not self._over.is_set():
            asked = self._was_asked()
            if asked or (self._follow and self._has_changed()):
                outcome = self.take_newer()
                if asked or outcome.state != "same":
                    self._log(outcome.reason)
                if self.server is not None:
                    self.server = running.answer(self.server, self._service.model, outcome.state, outcome.reason)
            self._wake.wait(self._every)
            self._wake.clear()

    def _was_asked(self) -> bool:
        asked = self._hangup.is_set() or (self.server is not None and self.server.asked.exists())
        self._hangup.clear()
        if asked and self.server is not None:
            with suppress(OSError):
                self.server.asked.unlink(missing_ok=True)
        return asked

    def _has_changed(self) -> bool:
        """Whether files of the model are others than those that were opened last, and have come to rest."""
        before, self._seen = self._seen, source_stamp(self._which)
        return self._seen != self._stamp and self._seen == before

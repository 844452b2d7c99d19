"""Callbacks of a program's own, called with each event of a run."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from typing import Protocol

from lapclip.machine.torch_settings import torch_kept
from lapclip.runs.events import Event


class Callback(Protocol):
    """Any function that takes an event: what events.jsonl gets, as an object with the same fields (`lapclip.events`).

    It is called in the thread that trains, after the event is written down, and training waits for it. A callback that
    raises does not end the run: there is a warning with its traceback, and it is not called any more. To end the run,
    raise `lapclip.StopTraining`.
    """

    def __call__(self, event: Event, /) -> None: ...


class StopTraining(Exception):
    """Raised by a callback to have its run save and end after this step. `lapclip.resume` goes on with it."""


class CallbackListener:
    """Calls callbacks, and stands between their faults and the run."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._reason: str | None = None

    def __call__(self, event: Event) -> None:
        for callback in self._callbacks[:]:
            try:
                with torch_kept():  # the next step's loss must not depend on it
                    callback(event)
            except StopTraining as stop:
                self._reason = self._reason or f"a callback: {stop}".removesuffix(": ")
            except Exception:
                self._callbacks.remove(callback)
                warnings.warn(
                    f"A callback failed at the event {event.type!r}. The run goes on without it.\n"
                    f"{traceback.format_exc()}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def stop_reason(self) -> str | None:
        """Why a callback wants the run to end; None where none does."""
        return self._reason

"""What surrounds the training of a run in its process: lock, heartbeat, priority, signals and log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from lapclip.config import Config, WorkConfig
from lapclip.errors import LapclipError
from lapclip.machine.desktop import Signals, kept_awake
from lapclip.machine.polite import lower_priority
from lapclip.machine.torchrun import under_torchrun
from lapclip.paths import open_own
from lapclip.runs import events
from lapclip.runs.events import Event, EventLog
from lapclip.runs.folder import Run
from lapclip.runs.heartbeat import Pulse
from lapclip.runs.messages import LineWriter
from lapclip.training.request import Callbacks
from lapclip.training.trackers import trackers

LOG_SECONDS = 10.0  # between lines of log.txt about steps
INTERRUPTED_START = "interrupted before its first step"


@contextmanager
def working_on(run: Run) -> Iterator[None]:
    """Lock a run, and show other processes that this one is alive."""
    pulse = Pulse(run.pulse, str(run.path.absolute()))
    with run.lock(), pulse:
        yield


@contextmanager
def behaving(work: WorkConfig) -> Iterator[None]:
    """Keep the machine awake and lower the priority of this process, as the settings say."""
    if work.polite:
        lower_priority()
    with kept_awake(wanted=work.keep_awake):
        yield


def stop_signals() -> Signals:
    """Return a listener for signals that ask a run to stop."""
    return Signals(twice=under_torchrun())


@contextmanager
def recording(run: Run, callbacks: Callbacks, config: Config) -> Iterator[EventLog]:
    """Open the run's event log, and write log.txt beside it."""
    tracked = trackers(config.work.track, run.path)
    text = open_own(run.log, "a", encoding="utf-8", errors="backslashreplace")
    try:
        writer = LineWriter(text, every=LOG_SECONDS, clock=time.monotonic)
        with closing(EventLog(run.events, writer, *tracked, *callbacks.listeners)) as log:
            yield log
    finally:
        with suppress(OSError):
            text.close()


@contextmanager
def recording_failed_start(run: Run) -> Iterator[None]:
    """Record why a run failed or was interrupted before its first step."""
    try:
        yield
    except KeyboardInterrupt:
        _record_end(run, events.Stopped(step=0, reason=INTERRUPTED_START))
        message = f"Interrupted before the first step. Go on: {run.resume_command()}"
        raise KeyboardInterrupt(message) from None
    except Exception as error:
        _record_end(run, events.Failed(step=0, error=str(error) or type(error).__name__))
        raise


def _record_end(run: Run, event: Event) -> None:
    with suppress(LapclipError, OSError), closing(EventLog(run.events)) as log:
        log.append(event)

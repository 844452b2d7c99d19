"""What can go wrong that a person can do something about.

    LapclipError              says what was wrong, where, and what to try; shown without a traceback
      ConfigError             an unknown recipe, field, model or value
      DataError               images or captions that cannot be used
      RunError                a run folder that exists, is missing, is busy or cannot go on
        RunBusy               another process is working on the run
      CheckpointError         a checkpoint that cannot be written or read
      TrainingError           training that cannot go on, such as a loss that is not a number
        LostRank              another process that trains the same model has ended or does not answer
        OutOfMemory           memory that ran out; several processes halve the micro-batch when they start again
      SearchError             an index of images, or a question to it, that cannot be used
      JoinError               another computer that cannot be joined, or be let in
        NoAnswer              it does not answer
        WrongKey              it does not know the key that was given
      WeightsError            weights from elsewhere that cannot be read, or ours that cannot be written so

Each error is one to three lines: the fault with its place, then, after "Try:", what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LapclipError(Exception):
    """A fault with its place, and what to try."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nTry: {self.hint}" if self.hint else self.message


def split_hint(text: str) -> tuple[str, str]:
    """Return the message and the hint of an error that was written down as text."""
    message, _, hint = text.replace("\n", " ").partition(" Try: ")
    return message, hint


class ConfigError(LapclipError):
    """An unknown recipe, field, model or value."""


class DataError(LapclipError):
    """Images or captions that cannot be used."""


class RunError(LapclipError):
    """A run folder that exists, is missing, is busy or cannot go on."""


class RunBusy(RunError):
    """Another process is working on the run."""


class CheckpointError(LapclipError):
    """A checkpoint that cannot be written or read."""


class TrainingError(LapclipError):
    """Training that cannot go on."""


class LostRank(TrainingError):
    """Another process that trains the same model has ended or does not answer."""


class OutOfMemory(TrainingError):
    """Memory that ran out where this process cannot change its settings by itself."""


class SearchError(LapclipError):
    """An index of images, or a question to it, that cannot be used."""


class JoinError(LapclipError):
    """Another computer that cannot be joined, or be let in."""


class NoAnswer(JoinError):
    """Another computer does not answer."""


class WrongKey(JoinError):
    """Another computer does not know the key that was given."""


class WeightsError(LapclipError):
    """Weights from elsewhere that cannot be read, or ours that cannot be written in another form."""


def first_line(error: BaseException, most: int = 100) -> str:
    """What an error says, short enough for a sentence; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, if any is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to a mistyped one, or all of them, as the end of a sentence."""
    known = list(known)
    if not known:
        return "There are none."
    close = closest(name, known)
    return f"Did you mean {close}?" if close else f"Known: {', '.join(known)}."

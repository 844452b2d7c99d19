"""Callbacks by which work that takes long says how far it is. Whoever shows them decides how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Status = Callable[[str], None]
"""Called with what is being done, where nobody knows how much will follow."""
Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is."""


class DataProgress(Protocol):
    """Called with how many images are done, how many there are, and what is being done to them."""

    def __call__(self, done: int, total: int, what: str = "drawing", /) -> None: ...


def ignore_progress(done: int, total: int, what: str = "", /) -> None:
    """Report nothing: a progress callback for callers that pass none."""


NOUNS = ("captions", "phrases", "images")
"""What data is made of, as work on it names it."""


def work_on_data(what: str) -> str:
    """What is being done, with what it is done to: to images, unless it says so itself."""
    return what if any(noun in what for noun in NOUNS) else f"{what} images"

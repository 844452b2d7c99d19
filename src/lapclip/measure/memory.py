"""Remember what was measured, so that the same question is not measured twice.

Two forms of an operation differ in the last bit. The same command run twice must choose the same
form to give the same losses, which two races do not guarantee.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lapclip import __version__
from lapclip.paths import CacheFile


@dataclass(frozen=True)
class Question:
    """What was to be decided, with everything that the answer depends on."""

    about: str
    """The setting that is decided, for example "linear"."""
    hardware: Sequence[str]
    """`Device.key` of each device: its chip, its kind, its name and the version of torch."""
    details: Mapping[str, Any]
    """Sizes, candidates and settings, as JSON has them."""

    @property
    def key(self) -> str:
        hardware = " and ".join(self.hardware)
        details = json.dumps(dict(self.details), sort_keys=True)
        return f"{self.about} on {hardware} lapclip {__version__} {details}"


class Memory:
    """Answers in a JSON file of the cache folder. A damaged file is ignored with a warning."""

    def __init__(self, file_name: str) -> None:
        self.file = CacheFile(file_name)

    def recall(self, question: Question) -> Any:
        """Return the remembered answer, or None. The caller checks that it makes sense."""
        return self.file.read(question.key)

    def remember(self, question: Question, answer: Any) -> None:
        """Store an answer: the winner and its reason, as JSON has them."""
        self.file.write(question.key, answer)

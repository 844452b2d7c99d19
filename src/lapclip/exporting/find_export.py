"""The exports in a run's folder: which model one was made from, and what its check found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.embedder import read_description
from lapclip.errors import LapclipError
from lapclip.exporting.export_folder import EXPORTED
from lapclip.runs.events import mapping, mappings
from lapclip.runs.folder import Run
from lapclip.text import number
from lapclip.weights import is_exported


@dataclass(frozen=True)
class FoundExport:
    """A folder that `lapclip export` wrote, and what its lapclip.json says."""

    folder: Path
    about: dict[str, Any]

    def is_of(self, fingerprint: str, weights: str) -> bool:
        """Whether it was made from this model; earlier releases recorded the digest of its weights."""
        return self.about.get("made_from") in (fingerprint, weights)

    @property
    def lost_nothing(self) -> bool:
        """Whether its check found that it answers as well as the model itself."""
        check = mapping(self.about.get("check"))
        before, after = number(check.get("recall_before")), number(check.get("recall_after"))
        return check.get("passed") is True and before is not None and after is not None and after >= before

    @property
    def image_speed(self) -> float | None:
        """How many times as fast as torch it read images; None where that was not timed, or beside others."""
        check = mapping(self.about.get("check"))
        rows = mappings(check.get("latency"))
        found = [row.get("ratio") for row in rows if (row.get("tower"), row.get("batch")) == ("image", 32)]
        return number(found[0]) if found and not check.get("busy") else None


def find_export(run: Run, to: str) -> FoundExport | None:
    """The export of a run in this format, if there is one that can be read."""
    folder = run.path / EXPORTED / to
    if not is_exported(folder):
        return None
    try:
        return FoundExport(folder, read_description(folder))
    except LapclipError:
        return None

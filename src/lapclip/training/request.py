"""The request for a new run: a recipe and the settings laid over it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lapclip.config import Config, Layer
from lapclip.data.table import Table
from lapclip.progress import DataProgress, Status
from lapclip.runs.events import Listener


@dataclass
class LoadedTable:
    """The data, if it was read already to choose the recipe."""

    table: Table | None = None

    def take(self) -> Table | None:
        """Return the table and forget it, so that its memory is freed once it is used."""
        table, self.table = self.table, None
        return table


@dataclass(frozen=True)
class RunRequest:
    """Requested settings, before the data is known."""

    recipe: str
    layers: Sequence[Layer]
    """The recipe's settings, then those of the user."""
    config: Config
    """All layers over the defaults. Some settings are still "auto"."""
    notes: list[str]
    """Messages for the user."""
    table: LoadedTable = field(default_factory=LoadedTable)
    reasons: dict[str, str] = field(default_factory=dict)
    """Reasons for settings that were chosen already."""

    def user_settings(self, section: str) -> dict[str, Any]:
        """Return the settings of a section that the user gave, without the recipe's."""
        return dict(self.layers[-1].values.get(section, {}))

    def is_set(self, section: str, name: str) -> bool:
        """Return whether the user or the recipe gave this setting."""
        return any(name in layer.values.get(section, {}) for layer in self.layers)

    @property
    def given(self) -> dict[str, dict[str, Any]]:
        """Everything that the user gave, --minutes included: enough to start another run like it."""
        sections: dict[str, dict[str, Any]] = {}
        for layer in self.layers[1:]:
            for section, values in layer.values.items():
                sections.setdefault(section, {}).update(values)
        return sections


@dataclass(frozen=True)
class Callbacks:
    """Functions to call for a run's events, and for progress before its first step."""

    listeners: Sequence[Listener] = ()
    data_progress: DataProgress | None = None
    tuning_progress: Status = lambda text: None
    stop_reason: Callable[[], str | None] = lambda: None
    """Called after each step. Returns why the run should save and end, or None."""

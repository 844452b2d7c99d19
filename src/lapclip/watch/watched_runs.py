"""The runs that are being watched: which they are, and which of them is in focus."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lapclip.errors import RunError
from lapclip.runs.folder import RUNS, Run, all_runs, find_run
from lapclip.runs.follow import FollowedRun
from lapclip.runs.view import RunView

SEARCH_EVERY = 3.0
"""Seconds between two searches for runs that began meanwhile."""


class WatchedRuns:
    """Several runs, one of them in focus. Without names: those that run, else the newest, and those that begin."""

    def __init__(self, names: Sequence[str], wait: bool) -> None:
        """`wait` accepts a name that has no folder yet; else it is an error."""
        self._every = not names
        self._began = time.time()
        self._searched = -1e9
        if names:
            paths = [_path_of(name, wait) for name in dict.fromkeys(names)]
        else:
            if not wait:
                find_run(None)
            runs = all_runs()
            paths = [run.path for run in [run for run in runs if run.running] or runs[-1:]]
        self.runs = [FollowedRun(Run(path)) for path in paths]
        self.focus = max(0, len(self.runs) - 1) if self._every else 0

    @property
    def views(self) -> list[RunView]:
        return [run.view for run in self.runs]

    def move(self, by: int) -> None:
        """Put another run in focus, round and round."""
        if self.runs:
            self.focus = (self.focus + by) % len(self.runs)

    def changed(self) -> bool:
        return any(run.changed() for run in self.runs) or (self._every and self._time_to_search())

    def refresh(self) -> None:
        """Bring everything up to date."""
        if self._every and self._time_to_search():
            self._searched = time.monotonic()
            known = {run.name for run in self.runs}
            began = [run for run in all_runs() if run.name not in known and self._began_meanwhile(run)]
            self.runs += [FollowedRun(run) for run in began]
        for run in self.runs:
            if run.changed():
                run.refresh()

    def _time_to_search(self) -> bool:
        return time.monotonic() - self._searched >= SEARCH_EVERY

    def _began_meanwhile(self, run: Run) -> bool:
        """Whether a run was made, or went on, since we watch."""
        for path in (run.events, run.settings):
            try:
                if path.stat().st_mtime >= self._began - 1:
                    return True
            except OSError:
                continue
        return False


def _path_of(name: str, wait: bool) -> Path:
    try:
        return find_run(name).path
    except RunError:
        if not wait:
            raise
        return Path(name) if len(Path(name).parts) > 1 else RUNS / name

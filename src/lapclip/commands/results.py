"""`lapclip results`: the files that people shared, read with distrust and put on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.errors import ConfigError
from lapclip.report import write_files
from lapclip.report.results_report import GOALS, machine_name, results_report, seconds_to
from lapclip.results import RUN, kind_of, read_result

NAME = "lapclip-results"
MOST_FILES = 1_000
"""Of more files nobody reads the page."""


@dataclass(frozen=True)
class Shared:
    """What files hold, each result once."""

    results: list[dict[str, Any]]
    sources: list[Path]
    """The file of each."""
    duplicates: list[tuple[Path, Path]]
    """Files that hold what another one holds, which counts."""

    def to_dict(self) -> dict[str, Any]:
        """For scripts."""
        found = [
            {
                "file": str(path),
                "machine_name": machine_name(result),
                "kind": kind_of(result),
                **_goals(result),
                **result,
            }
            for path, result in zip(self.sources, self.results, strict=True)
        ]
        again = [{"file": str(path), "same_as": str(first)} for path, first in self.duplicates]
        return {"results": found, "duplicates": again}


def _goals(result: dict[str, Any]) -> dict[str, Any]:
    """Which goal a run is compared by, and how soon it was there."""
    goal = next((name for name, goal in GOALS.items() if kind_of(result) == RUN and goal.fits(result)), None)
    return {"goal": goal, "goal_seconds": seconds_to(GOALS[goal], result) if goal else None}


def read_results(paths: Sequence[Path]) -> Shared:
    """The results in files, and in all JSON files of folders. ConfigError for the first that cannot be used."""
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    if not files:
        raise ConfigError("There is no file of results to read.", hint="lapclip report --share mine.json")
    if len(files) > MOST_FILES:
        raise ConfigError(f"{len(files):,} files are too many for one page; it has at most {MOST_FILES:,}.")
    results, sources, duplicates = [], [], []
    first: dict[str, Path] = {}
    for path in files:
        result = read_result(path)
        if result["checksum"] in first:
            duplicates.append((path, first[result["checksum"]]))
        else:
            first[result["checksum"]] = path
            results.append(result)
            sources.append(path)
    return Shared(results, sources, duplicates)


def _files(path: Path) -> list[Path]:
    try:
        return sorted(path.glob("*.json")) if path.is_dir() else [path]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def write_results(shared: Shared, out: Path | None) -> list[Path]:
    """The page and the same as Markdown."""
    return write_files(results_report(shared.results), out or Path(), NAME)

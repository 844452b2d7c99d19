"""`lapclip clean`: list what takes space on this disk, and remove runs and caches. No torch.

Looks only where lapclip writes: runs/ here, the cache folder and the folder of search indexes. Never
follows a link, and never removes what a process uses.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lapclip import paths
from lapclip.config import parse_settings
from lapclip.errors import ConfigError, LapclipError, RunError, nearest
from lapclip.paths import cache_folder, data_folder
from lapclip.runs.folder import GIVEN, RUNS, Run, TrainRequest, all_runs, given_name
from lapclip.runs.heartbeat import runs_in_use
from lapclip.searching.indexes import what_is_indexed
from lapclip.suggest import command
from lapclip.weights.published_models import FOLDER as MODELS

RUN, CACHE, DATA, INDEX = "run", "cache", "data", "index"
CACHES = (
    "packed-*",
    "bundle-*",
    "scenes-*",
    "features-*.npy",
    "tower-*",
    f"{MODELS}/*/",
    "*.json",
)
IN_USE = "another process uses it now"
DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Item:
    """A run, a cache or an index, and the space that it takes."""

    kind: str
    path: Path
    about: str
    bytes: int
    unused_days: float
    kept: str = ""
    """Reason why it cannot be removed now."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "kept": self.kept or None}


def list_items() -> list[Item]:
    """Return everything that takes space, by kind, the largest first."""
    items = [*_runs(), *_data(), *_caches(), *_indexes()]
    in_use = _paths_in_use()
    for number, item in enumerate(items):
        if not item.kept and os.path.realpath(item.path) in in_use:
            items[number] = replace(item, kept=IN_USE)
    kinds = [RUN, CACHE, DATA, INDEX]
    return sorted(items, key=lambda item: (kinds.index(item.kind), -item.bytes, str(item.path)))


def select(
    items: Sequence[Item], runs: Sequence[str], older_than: float | None, caches: bool
) -> list[Item]:
    """Return what to remove: the named runs, all old runs if only an age is given, and caches."""
    if older_than is not None and not 0 <= older_than < math.inf:
        raise ConfigError(
            f"--older-than must be a number of days from 0, not {older_than:g}.",
            hint="lapclip clean --older-than 30",
        )
    known = {item.path.name: item for item in items if item.kind == RUN}
    for name in runs:
        if name not in known:
            where = f"No run called {name} in {RUNS.absolute()}."
            raise RunError(f"{where} {nearest(name, known)}", hint="lapclip runs")
        if known[name].kept:
            is_running = known[name].about in ("running", "starting")
            wait = "the same command, once that process has ended"
            hint = command("stop", name) if is_running else wait
            raise RunError(f"{known[name].path} stays: {known[name].kept}.", hint=hint)
    selected = [known[name] for name in dict.fromkeys(runs)]
    if not runs and not caches and older_than is not None:
        selected = list(known.values())
    if caches:
        selected += [item for item in items if item.kind in (CACHE, DATA)]
    least_days = older_than or 0
    return [item for item in selected if not item.kept and item.unused_days >= least_days]


def remove(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Remove items. Return those that are gone, and those that could not be removed."""
    if not items:
        return [], []
    removed, failed = [], []
    current = {item.path: item for item in list_items()}  # a person was asked in between
    for item in items:
        now = current.get(item.path)
        reason = now.kept if now else "it is gone"
        if not reason:
            try:
                _remove_one(item)
            except LapclipError as error:
                reason = error.message
            except OSError as error:  # Windows keeps what a program has open
                reason = error.strerror or str(error)
        if reason:
            failed.append(replace(item, kept=reason))
        else:
            removed.append(item)
    return removed, failed


def _remove_one(item: Item) -> None:
    with ExitStack() as stack:
        if item.kind == RUN:
            stack.enter_context(Run(item.path).lock())
        if os.name == "nt":  # no folder with an open file can be renamed there
            stack.close()
        paths.remove_whole(item.path)


def _runs() -> Iterator[Item]:
    if RUNS.is_symlink():
        return
    yield from _leftovers(RUNS)
    in_use = runs_in_use()
    for run in all_runs():
        if not run.path.is_symlink():
            state, kept = run.state, ""
            if state in ("running", "starting"):
                kept = f"it is {state}"
            elif os.path.realpath(run.path) in in_use:
                kept = "another process uses its model now"
            yield _item(RUN, run.path, state, kept)


def _data() -> Iterator[Item]:
    """List data that Python code gave. What a run learns from stays, and all while a run begins."""
    if RUNS.is_symlink() or GIVEN.is_symlink():
        return
    yield from _leftovers(GIVEN)
    runs = all_runs()
    used_by = {given_name(_data_source(run)): run.name for run in runs}
    is_starting = any(run.state == "starting" for run in runs)
    for path in GIVEN.glob("[!.]*"):
        if path.is_dir() and not path.is_symlink():
            kept = "a run begins here, perhaps with it" if is_starting else ""
            if path.name in used_by:
                kept = f"{used_by[path.name]} learns from it"
            yield _item(DATA, path, "data given by Python code", kept)


def _data_source(run: Run) -> str:
    """Return what a run learns from, or was asked to if it never began: `resume` may start it."""
    if run.settings.exists():
        return run.data_source() or ""
    try:
        requested = parse_settings(list(TrainRequest.read(run.request).settings)).values
    except LapclipError:
        return ""
    return str(requested.get("data", {}).get("source", ""))


def _caches() -> Iterator[Item]:
    root = cache_folder()
    yield from _leftovers(root)
    for pattern in CACHES:
        for path in root.glob(pattern):
            if path.suffix != ".partial" and not path.is_symlink():
                yield _item(CACHE, path, _cached_source(path))


def _indexes() -> Iterator[Item]:
    for path in (data_folder() / "search").glob("[!.]*"):
        if path.is_dir() and not path.is_symlink():
            yield _item(INDEX, path, what_is_indexed(path))


def _leftovers(folder: Path) -> Iterator[Item]:
    for path in paths.leftovers(folder):
        yield _item(CACHE, path, "left by a process that was killed")


def _cached_source(store: Path) -> str:
    """Return whose images a packed store has."""
    try:
        return (store / "source").read_bytes().decode("utf-8", "replace")[:200]
    except OSError:
        return ""


def _item(kind: str, path: Path, about: str, kept: str = "") -> Item:
    """Measure the files of an item. Links count as nothing."""
    files = [] if path.is_dir() else [path]
    for folder, _, names in os.walk(path):
        files += [Path(folder, name) for name in names]
    total_bytes, last_used = 0, 0.0
    for file in files:
        with suppress(OSError):
            status = file.lstat()
            total_bytes += status.st_size
            if file.name != "lock":  # looking at it changes it
                last_used = max(last_used, status.st_mtime)
    unused_days = max(0.0, time.time() - last_used) / DAY_SECONDS
    return Item(kind, path, about, total_bytes, round(unused_days, 2), kept)


def _paths_in_use() -> set[str]:
    """Return what other processes of Python have open or mapped, and the folders above it."""
    files: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            name = process.name().lower()
            if process.pid == os.getpid() or ("python" not in name and "lapclip" not in name):
                continue
            files |= {file.path for file in process.open_files()}
            if hasattr(process, "memory_maps"):  # not on macOS
                files |= {region.path for region in process.memory_maps()}
    folders = {str(folder) for file in files for folder in Path(file).parents}
    return files | folders

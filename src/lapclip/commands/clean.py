"""`lapclip clean`: what takes room on this disk, and removing what is named. No torch.

Looks only where lapclip itself writes: runs/ here, the folder of caches and the folder of indexes. Links are never
followed, and what a process works with now stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import psutil

from lapclip import paths
from lapclip.data.packed_index import LOCK as PACKED_LOCK
from lapclip.errors import ConfigError, LapclipError, RunError, nearest
from lapclip.paths import cache_folder, data_folder
from lapclip.runs.folder import GIVEN, RUNS, Run, all_runs, given_name
from lapclip.runs.heartbeat import PREPARING, others_at_work, runs_in_use
from lapclip.searching.index import LOCK
from lapclip.searching.indexes import databases_in, what_is_indexed
from lapclip.suggest import command
from lapclip.weights.published_models import FOLDER as MODELS

KINDS = {
    "leftovers": "what killed processes left half-made, and damaged checkpoints",
    "checkpoints": "the checkpoints of finished runs, which nothing needs any more",
    "packed": "photos decoded for training; packed again when needed",
    "bundles": "data brought over by lapclip join, whole or by half; brought over again when needed",
    "scenes": "drawn images; drawn again when needed",
    "features": "what frozen towers and teachers made of data; made again when needed, if the teacher is still there",
    "models": "published models; fetched again when needed",
    "towers": "networks unpacked from the packages they come in; unpacked again when needed",
    "measurements": "what was measured on this machine; measured again when needed",
    "indexes": "indexes of searched folders; made again at the next search",
    "data": "data that Python code gave; it stays as long as a run here learnt from it",
    "runs": "whole runs, each only by its name: --run NAME",
}
REMOVABLE = [kind for kind in KINDS if kind != "runs"]
AT_WORK = ("running", "starting")
MEASUREMENTS = (
    "tune.json",
    "kernels.json",
    "canary.json",
    "compare.json",
    "calibration-*.safetensors",
)
"""Not trusted.json: what the user has agreed to is no measurement."""
WORKS, WRITES = "a process works with it now", "a process writes to it now"
USES = "another process uses its model now, for example to serve it"
CACHES = {
    "packed": "packed-*",
    "bundles": "bundle-*",
    "scenes": "scenes-*",
    "features": "features-*.npy",
    "towers": "tower-*",
    "models": f"{MODELS}/*/",
}
"""Of published models their files; what they were when they were first fetched lies beside them, and stays."""


@dataclass(frozen=True)
class Item:
    """Something that takes room."""

    kind: str
    path: Path
    bytes: int
    about: str = ""
    kept: str = ""
    """Why it cannot be removed now; empty where it can."""
    run: Run | None = None
    """Whose lock tells that nobody works with it."""
    locks: tuple[Path, ...] = ()
    """Other locks that tell so."""

    def to_dict(self) -> dict[str, Any]:
        told = {"kind": self.kind, "path": str(self.path), "bytes": self.bytes, "about": self.about}
        return {**told, "kept": self.kept or None}


@dataclass(frozen=True)
class Cleaned:
    """What there is, and what was removed of it."""

    items: list[Item]
    removed: list[Item] = field(default_factory=list)
    failed: list[Item] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": [item.to_dict() for item in self.items],
            "bytes": {
                kind: sum(item.bytes for item in self.items if item.kind == kind) for kind in KINDS
            },
            "removed": [item.to_dict() for item in self.removed],
            "failed": [item.to_dict() for item in self.failed],
            "removed_bytes": sum(item.bytes for item in self.removed),
        }


def list_items() -> list[Item]:
    """All that takes room, kind by kind, the largest first."""
    found = [*_runs(), *_given(), *_caches(), *_indexes()]
    in_use = _in_use([item.path for item in found])
    found = [
        replace(item, kept=WORKS) if item.path in in_use and not item.kept else item
        for item in found
    ]
    order = list(KINDS)
    return sorted(found, key=lambda item: (order.index(item.kind), -item.bytes, str(item.path)))


def chosen(items: Sequence[Item], kinds: Sequence[str], runs: Sequence[str]) -> list[Item]:
    """What these kinds and these names of runs mean, but for what has to stay."""
    for kind in kinds:
        if kind not in REMOVABLE:
            raise ConfigError(
                f"No kind called {kind}. {nearest(kind, REMOVABLE)}", hint="lapclip clean"
            )
    whole = {item.path.name: item for item in items if item.kind == "runs"}
    for name in runs:
        if name not in whole:
            raise RunError(
                f"No run called {name} in {RUNS.absolute()}. {nearest(name, whole)}",
                hint="lapclip runs",
            )
        if whole[name].kept:
            works = whole[name].about in AT_WORK
            hint = (
                command("stop", name) if works else "the same command, once that process has ended"
            )
            raise RunError(f"{whole[name].path} stays: {whole[name].kept}.", hint=hint)
    named = [whole[name] for name in dict.fromkeys(runs)]
    inside = tuple(item.path for item in named)
    others = [item for item in items if item.kind in kinds and not item.kept]
    return [
        *named,
        *(item for item in others if not any(item.path.is_relative_to(path) for path in inside)),
    ]


def remove(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Remove them; gives back what is gone, and what could not be. All that was listed may have changed since, while
    a person was asked."""
    removed, failed = [], []
    in_use = _in_use([item.path for item in items])
    for item in items:
        try:
            if item.path in in_use:
                raise OSError(WORKS)
            with _alone(item):
                paths.remove_whole(item.path)
            removed.append(item)
        except LapclipError as error:
            failed.append(replace(item, kept=error.message))
        except OSError as error:  # Windows keeps what a program has open
            failed.append(replace(item, kept=error.strerror or str(error)))
    return removed, failed


@contextmanager
def _alone(item: Item) -> Iterator[None]:
    """Keep others from an item that is about to go; raises where one works with it, or it is not what it was."""
    item.path.lstat()  # asking for a lock would make its folder
    if item.path.is_symlink():
        raise OSError("it has become a link")
    with ExitStack() as held:
        for lock in (*([item.run.lock()] if item.run else []), *map(_holding, item.locks)):
            held.enter_context(lock)
        if item.run and item.run.is_starting:
            raise OSError("it is starting")
        if item.kind == "runs" and os.path.realpath(item.path) in runs_in_use():
            raise OSError(USES)
        if item.run and item.kind == "checkpoints" and item.run.last_state() != "finished":
            raise OSError("its run is not finished any more")
        if item.kind == "data" and (why := _why_given_stays([item.path.name])[item.path.name]):
            raise OSError(why)
        if (
            os.name == "nt"
        ):  # no folder with an open file can be renamed there, so that a lock taken now keeps it too
            held.close()
        yield


def _runs() -> Iterator[Item]:
    if RUNS.is_symlink():
        return
    for path in paths.leftovers(RUNS):
        yield Item("leftovers", path, _size(path))
    in_use = runs_in_use()
    for run in all_runs():
        if run.path.is_symlink():
            continue
        state = run.state
        busy = f"it is {state}" if state in AT_WORK else ""
        used = USES if os.path.realpath(run.path) in in_use else ""
        yield Item("runs", run.path, _size(run.path), state, busy or used, run)
        if run.checkpoints.is_symlink():
            continue
        if state == "finished" and run.checkpoints.is_dir():
            yield Item("checkpoints", run.checkpoints, _size(run.checkpoints), run.name, run=run)
        elif not busy:
            # The lock of a run tells that nobody is just writing, so all of it is left behind.
            for path in (
                *run.checkpoints.glob(".step-*.partial"),
                *run.checkpoints.glob("damaged-step-*"),
            ):
                if not path.is_symlink():
                    yield Item("leftovers", path, _size(path), run.name, run=run)
        for folder in (run.path, run.model, run.path / "exported"):
            for path in paths.leftovers(folder):
                if (
                    path.suffix != ".old"
                ):  # perhaps the only copy of an export, which the next export moves back
                    yield Item("leftovers", path, _size(path), run.name)


def _given() -> Iterator[Item]:
    if RUNS.is_symlink() or GIVEN.is_symlink():
        return
    for path in paths.leftovers(GIVEN):
        yield Item("leftovers", path, _size(path))
    found = [path for path in GIVEN.glob("[!.]*") if path.is_dir() and not path.is_symlink()]
    kept = _why_given_stays([path.name for path in found])
    for path in found:
        yield Item("data", path, _size(path), kept=kept[path.name])


def _why_given_stays(names: Sequence[str]) -> dict[str, str]:
    """Why data that Python code gave has to stay, by its name; empty where it can go. Names tell it, not paths: the
    folder around the runs may have been moved."""
    runs = all_runs()
    learnt = {given_name(run.data_source() or ""): run.name for run in runs}
    preparing = [Path(beat.about) for beat in others_at_work(PREPARING)]
    begins = any(run.is_starting for run in runs) or any(
        path.is_relative_to(RUNS.absolute()) for path in preparing
    )
    otherwise = "a run begins here, perhaps with it" if begins else ""
    return {
        name: f"{learnt[name]} learnt from it" if name in learnt else otherwise for name in names
    }


def _caches() -> Iterator[Item]:
    root = cache_folder()
    for path in paths.leftovers(root):
        yield Item("leftovers", path, _size(path))
    for kind, pattern in CACHES.items():
        for path in root.glob(pattern):
            if not path.is_symlink() and not path.name.endswith(".partial"):
                locks = (path / PACKED_LOCK,) if kind == "packed" else ()
                yield Item(kind, path, _size(path), _source(path), _held(locks), locks=locks)
    for path in (path for name in MEASUREMENTS for path in root.glob(name)):
        if path.is_file() and not path.is_symlink():
            yield Item("measurements", path, _size(path))


def _indexes() -> Iterator[Item]:
    root = data_folder() / "search"
    for path in root.glob("*"):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            locks = tuple(database.with_name(LOCK) for database in databases_in(path))
            yield Item(
                "indexes", path, _size(path), what_is_indexed(path), _held(locks), locks=locks
            )
    for path in paths.leftovers(root):
        yield Item("leftovers", path, _size(path))


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as nothing."""
    if not path.is_dir():
        with suppress(OSError):
            return path.lstat().st_size
        return 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _source(store: Path) -> str:
    """Whose images a packed store has, and since when nobody used it."""
    try:
        file = store / "source" if store.is_dir() else store
        days = (time.time() - file.stat().st_mtime) / 86_400
        name = file.read_bytes().decode("utf-8", "replace")[:200] if store.is_dir() else ""
    except OSError:
        return ""
    return ", ".join(
        filter(None, (name, f"used {days:.0f} days ago" if days >= 1 else "used today"))
    )


def _held(locks: Sequence[Path]) -> str:
    """Why something with these locks has to stay; nothing where nobody holds one."""
    try:
        for lock in locks:
            if lock.exists() and not lock.is_symlink():
                with _holding(lock):
                    pass
    except OSError as error:
        return str(error) if str(error) == WRITES else ""
    return ""


@contextmanager
def _holding(path: Path) -> Iterator[None]:
    """Hold a lock; an OSError where another process does."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise OSError(WRITES) from None
    try:
        yield
    finally:
        lock.release()


def _in_use(found: Sequence[Path]) -> set[Path]:
    """Those of the paths that a process has open or has mapped, as far as the system tells."""
    real = {os.path.realpath(path): path for path in found}
    used: set[Path] = set()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        names: set[str] = set()
        with suppress(psutil.Error, OSError):
            if "python" not in process.name().lower() and "lapclip" not in process.name().lower():
                continue
            names |= {file.path for file in process.open_files()}
        with suppress(psutil.Error, OSError, AttributeError):  # macOS tells no maps
            names |= {region.path for region in process.memory_maps()}
        for name in names:
            used |= {
                real[str(folder)]
                for folder in (Path(name), *Path(name).parents)
                if str(folder) in real
            }
    return used

"""Turn a command into an export: which model, which format, which pairs it is checked on, and the check itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.commands.evaluation_data import CHANGED_FILES
from lapclip.config import DataConfig
from lapclip.data.loading import list_data
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN
from lapclip.embedder import Embedder, load_torch
from lapclip.errors import DataError
from lapclip.exporting import CheckPairs, ExportFormat, Job, Written, find_format
from lapclip.exporting.check import Embedded, compare_and_time, without_running
from lapclip.exporting.export_folder import EXPORTED, check_free, written_whole
from lapclip.progress import DataProgress, Progress, Status
from lapclip.seeding import generator
from lapclip.which_model import WhichModel, which_model

MOST, TRAINING = 1000, 256
"""Held-out images that an export is checked on, and training images that int8 is chosen and scaled with."""


@dataclass(frozen=True)
class Callbacks:
    """Callbacks for status and progress."""

    status: Status = lambda _: None
    data: DataProgress | None = None
    counting: Callable[[str], Progress] = lambda _: lambda done, total: None
    """Given what is being done, gives the callback that counts it."""


def export(
    model: str | None,
    to: str,
    out: Path | None = None,
    *,
    force: bool = False,
    callbacks: Callbacks = Callbacks(),
) -> dict[str, Any]:
    """Write a run's model, or any other that can be loaded, as a folder, and check it before it is called done."""
    format, which = find_format(to), which_model(model)
    with which.in_use():
        return _export(format, which, to, out, force=force, callbacks=callbacks)


def _export(
    format: ExportFormat,
    which: WhichModel,
    to: str,
    out: Path | None,
    *,
    force: bool,
    callbacks: Callbacks,
) -> dict[str, Any]:
    path = out or default_path(which, to)
    check_free(path, force=force)  # before what takes time
    format.check_packages()
    callbacks.status("reading the model")
    embedder = load_torch(which.path)
    format.check_model(embedder, which.path)
    pairs = open_pairs(which, embedder.view, callbacks.data)
    with written_whole(path, force=force) as folder:
        job = Job(embedder, folder, pairs, callbacks.status, _title(which))
        result = write_and_check(format, job, callbacks.counting)
    files = sorted(path.iterdir())
    return {
        "model": str(which.path),
        "out": str(path),
        "files": [str(file) for file in files],
        "bytes": sum(map(_bytes, files)),
        **result,
    }


def default_path(which: WhichModel, to: str) -> Path:
    """Beside the run that it came from; for another model, in the current folder."""
    if which.run:
        which.run.check_links()
        return which.run.path / EXPORTED / to
    return Path(f"{_title(which)}-{to}")


def _title(which: WhichModel) -> str:
    """The run's name, or that of the model's file or folder: a README is read elsewhere, where no path leads there."""
    if which.run:
        return which.run.name
    return which.path.stem if which.path.is_file() else which.path.name


def write_and_check(
    format: ExportFormat,
    job: Job,
    counting: Callable[[str], Progress] = lambda _: lambda done, total: None,
) -> dict[str, Any]:
    """Fill a folder, and compare what was written with the model itself on held-out pairs."""
    held_out = job.pairs.held_out
    written = format.write(job)
    before = Embedded.by(job.embedder, held_out, counting("embedding held-out pairs with torch"))
    exported = format.open(job)
    if exported is None:
        check = without_running(before)
    else:
        after = Embedded.by(
            exported, held_out, counting(f"embedding held-out pairs with {format.engine}")
        )
        check = compare_and_time(job.embedder, exported, before, after, held_out, job.status)
    check = {
        "checked_on": job.pairs.checked_on,
        "split": job.pairs.split,
        **check,
        **_sizes(job.embedder, written),
        **written.facts,
    }
    reasons = [tower["why"] for tower in written.towers.values() if "why" in tower]
    notes = [*written.notes, *reasons, *job.pairs.notes]
    result = {"format": format.name, **check, "towers": written.towers, "notes": notes}
    format.finish(job, written, check, result)
    return result


def _sizes(embedder: Embedder, written: Written) -> dict[str, int]:
    numbers = sum(tensor.numel() for tensor in embedder.model.state_dict().values())
    return {"weights_bytes_before": 4 * numbers, "weights_bytes": sum(map(_bytes, written.weights))}


def _bytes(path: Path) -> int:
    if path.is_dir():
        return sum(member.stat().st_size for member in path.rglob("*") if member.is_file())
    return path.stat().st_size


def open_pairs(which: WhichModel, view: View, progress: DataProgress | None) -> CheckPairs:
    """The run's own held-out and training pairs; for a model without a run, or without data, the built-in scenes."""
    few = DataConfig(train_pairs=TRAINING)
    if which.config is None:
        return _check_pairs(few, view, progress)
    try:
        return _check_pairs(which.config.data, view, progress, which.run and which.run.seen)
    except DataError as error:
        note = f"The run's own data cannot be used ({error.message}), so the built-in scenes were used instead."
        return replace(_check_pairs(few, view, progress), notes=(note,))


def _check_pairs(
    config: DataConfig, view: View, progress: DataProgress | None, seen: Path | None = None
) -> CheckPairs:
    listing = list_data(config, view, progress)
    rows, splits = listing.table.rows, listing.splits
    split = "test" if "test" in splits else "val"
    chosen = {
        name: _drawn(
            [at for at, own in enumerate(splits) if own == name and rows[at].captions], most
        )
        for name, most in ((split, MOST), (TRAIN, TRAINING))
    }
    if not all(chosen.values()):
        raise DataError(f"{config.source} has no captions in the split {split} or for training")
    held_out, _ = listing.load(chosen[split], view, progress)
    training, _ = listing.load(chosen[TRAIN], view, progress)
    if (
        held_out.identities is not None and training.identities is not None
    ):  # copies of held-out files stay out
        training = training.select(
            np.flatnonzero(~np.isin(training.identities, held_out.identities)).tolist()
        )
    there, used = splits.count(split), len(held_out)
    count = f"{used} images" if used == there and listing.drawn else f"{used} of its {there} images"
    name = find_source(config.source).title or config.source
    changed = seen is not None and listing.has_changed_since(seen, view, progress)
    notes = (CHANGED_FILES,) if changed else ()
    return CheckPairs(held_out, training, f"{name}, split {split}: {count}", notes, split)


def _drawn(rows: list[int], most: int) -> list[int]:
    """All rows, or as many as are wanted, drawn at random and in order."""
    if len(rows) <= most:
        return rows
    return sorted(generator(0, "export").choice(rows, most, replace=False).tolist())

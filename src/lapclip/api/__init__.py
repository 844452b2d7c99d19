"""What `import lapclip` offers beside models: the commands as functions.

They are the same code as the commands, with the same files, checks and refusals; what a command refuses is an error of
`lapclip.errors` here. Nothing is asked, unless in a terminal whether a published model may be fetched, which `yes=True`
allows; nothing is printed but progress, which `progress=False` leaves out.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.api.arguments import (
    as_path,
    as_texts,
    asked_settings,
    held,
    joined,
    model_name,
)
from lapclip.api.callbacks import Callback, CallbackListener
from lapclip.api.folder_search import FolderSearch
from lapclip.api.training_run import TrainingRun
from lapclip.cli.display import Display, display
from lapclip.commands import evaluate as evaluating
from lapclip.commands import export as exporting
from lapclip.commands import resume as resuming
from lapclip.commands import train as training
from lapclip.commands import tune as tuning
from lapclip.commands.evaluation_data import EvaluationRequest
from lapclip.config import flag_settings, recipe_for
from lapclip.errors import ConfigError, RunBusy
from lapclip.machine.torch_settings import compute_in_float32, plain_thread, torch_kept
from lapclip.machine.torchrun import under_torchrun
from lapclip.report.document import table_html
from lapclip.report.evaluation_report import class_table, recall_table
from lapclip.runs.folder import TrainRequest, find_run
from lapclip.searching.library import open_library
from lapclip.suggest import command
from lapclip.text import path_from_here, percent
from lapclip.training.outcome import TrainOutcome
from lapclip.training.request import Callbacks
from lapclip.which_model import have_model, start_setting, teacher_setting

if TYPE_CHECKING:
    from lapclip.api.arguments import Data, Model, Settings

__all__ = [
    "Evaluation",
    "Interrupted",
    "evaluate",
    "export",
    "open_run",
    "resume",
    "search",
    "train",
    "tune",
]

_at_work = threading.Lock()
"""Held while this process trains or tunes: both change how many threads torch has, which results depend on."""


class Interrupted(KeyboardInterrupt):
    """Raised where a run was interrupted (Ctrl-C, or a notebook's stop button), after everything was saved.

    `run` is the run as it stands; `lapclip.resume(error.run)` goes on with it, and so does `lapclip.resume()` while it
    is the newest run. An interrupt after the last step leaves `run.state` "finished", with nothing to go on with.
    """

    def __init__(self, run: TrainingRun, step: int) -> None:
        super().__init__(run, step)
        self.run = run
        self.step = step

    def __str__(self) -> str:
        path = path_from_here(self.run.path)
        if self.run.state == "finished":
            return f"Interrupted at the end of {path}; it is finished and saved."
        return f"Stopped after step {self.step:,} of {path}; everything is saved. Go on: lapclip.resume({path!r})"

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: there is no fault to look for."""
        return [str(self)]


def train(
    data: Data = None,
    *,
    recipe: str | None = None,
    minutes: float | None = None,
    name: str | None = None,
    start: Model | None = None,
    teacher: Model | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    ask: str | Sequence[str] = (),
    polite: bool = False,
    settings: Settings | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    yes: bool = False,
) -> TrainingRun:
    """Train a model, as `lapclip train` does: with checkpoints, and so that a run that ends early is resumed exactly.

    Works in scripts, in notebooks and in threads, and needs no worker processes. An interrupt saves and raises
    `lapclip.Interrupted`; in a thread that is not the main one, where Python has no interrupts, `lapclip stop` and
    `lapclip.StopTraining` end a run. One run at a time is trained in a process.

    Parameters
    ----------
    data
        What to learn from; None for the scenes that lapclip draws. Either a path as `lapclip train` takes it: a folder,
        a table, shards. Or what a program has in memory: a list of pairs (image, caption); a data set of torch that
        gives such pairs; a frame of pandas or polars, or a dictionary of columns; a `Dataset` of Hugging Face; or a
        dictionary of splits with one of these each, such as `{"train": ..., "val": ...}` or a `DatasetDict`. An image
        is a path, bytes, a PIL image, an array or a tensor; a caption is a text or a list of texts. What is in memory
        is first written to `runs/.data/`, from where the run reads it, also when it is resumed; where all images are
        paths, they stay where they are and are not copied.
    recipe
        A recipe's name or a TOML file; without it, the one that fits the data. See `lapclip train --help`.
    minutes
        Fill this many minutes; the schedule is fitted to them.
    name
        Name of the run's folder under `runs/` in the current folder; without it, the recipe's.
    start
        The model to go on from: a run, published weights, a short name that `lapclip models` lists.
    teacher
        A model that this one learns from, too.
    device, batch_size, epochs, lr
        Short for the settings `train.device`, `train.batch_size`, `train.epochs` and `train.learning_rate`; they win
        over `settings`.
    ask
        Captions of your own to follow while it learns.
    polite
        Run at a low priority; pause on a low battery, under heat and while swap grows.
    settings
        Changes of the recipe's settings: `{"train.batch_size": 64, "data.caption_column": "title"}`.
    callbacks
        Functions that are called with each event of the run (`lapclip.Callback`).
    progress
        Show how far it is: as a bar in a terminal, elsewhere as lines.
    yes
        Fetch a published model without asking.

    For example:

        run = lapclip.train(minutes=2)
        run.metrics["t2i_r1"], run.history[-1]["loss"]
        run.plot()
        run.model.classify("cat.jpg", ["cat", "dog"])
        run = lapclip.train([("cat.jpg", "a cat asleep"), ("dog.jpg", "a dog")], recipe="heads")
    """
    with _working(progress) as shown:
        listener = CallbackListener(callbacks)
        minutes = None if minutes is None else float(minutes)  # a number of numpy, too
        own: dict[str, Any] = {"work.polite": True} if polite else {}
        if ask:
            own["work.ask"] = joined("ask", ask)
        start_name, teacher_name = model_name(start), model_name(teacher)
        for model in (start_name, teacher_name):
            _have(model, shown, yes=yes)
        asked = asked_settings(data, settings, shown.data_progress if shown else None)
        named = (*start_setting(start_name), *teacher_setting(teacher_name))
        chosen = recipe_for(asked.get("data.source"), as_path(recipe), start_name)
        flags = flag_settings(
            {"device": device, "batch_size": batch_size, "epochs": epochs, "lr": lr}
        )
        given, following = [*as_texts(asked | own), *named, *flags], _callbacks(shown, listener)
        with held(asked):
            request = TrainRequest(chosen, tuple(given), minutes)
            outcome = training.train(request, name, following)
    return _ended(outcome)


def resume(
    run: str | os.PathLike[str] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> TrainingRun:
    """Go on with a run that was stopped, interrupted or killed; it ends with the result it would have had.

    Parameters
    ----------
    run
        A run's name or folder, or a `TrainingRun`; without one, the newest that is not finished.
    callbacks, progress
        As for `lapclip.train`.
    """
    with _working(progress) as shown:
        listener = CallbackListener(callbacks)
        outcome = resuming.resume(as_path(run), _callbacks(shown, listener))
    return _ended(outcome)


def open_run(run: str | os.PathLike[str] | None = None) -> TrainingRun:
    """A run that is there, by its name or folder; without one, the newest. Commands and Python see the same runs."""
    found = find_run(as_path(run))
    if not found.request.exists() and not found.settings.exists():
        found.read_settings()  # says that it is no run
    return TrainingRun(found.path)


class Evaluation(dict[str, Any]):
    """What `lapclip eval --json` prints, as a dictionary that a notebook shows as a table."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The numbers alone: recall of pairs, or how many images of classes get the right one."""
        return self["evaluation"] if "evaluation" in self else self["zeroshot"]

    def __repr__(self) -> str:
        found = self.metrics
        key, text = ("t2i_r1", "text to image R@1") if "t2i_r1" in found else ("top1", "top-1")
        return f"<Evaluation of {self['run']} on {self['data']}, split {self['split']}: {text} {percent(found[key])}>"

    def _repr_html_(self) -> str:
        return table_html(
            recall_table(self, self.metrics) if "evaluation" in self else class_table(self.metrics)
        )


def evaluate(
    model: Model | None = None,
    data: Data = None,
    *,
    split: str | None = None,
    device: str = "auto",
    out: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    before: Model | None = None,
    check: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    blend: bool = False,
    progress: bool = True,
    yes: bool = False,
) -> Evaluation:
    """Score a model on images it was not trained on, as `lapclip eval` does: recall both ways with intervals, chance
    and more. The evaluation is saved in the run's folder with a page.

    Parameters
    ----------
    model
        A run's name or folder, a `TrainingRun`, a folder or file with a model, a published model's name, or a model
        that `lapclip.load` gave; without one, the newest run with a model.
    data
        Other images to score on, in any form that `lapclip.train` takes; without it, the run's own held-out ones.
    split
        `train`, `val`, `test` or `all`; without it test, else val, else all.
    device
        `auto`, `cpu`, `cuda`, `mps` or `xpu`.
    out
        Folder for the evaluation and its page; without one, the run's own.
    settings
        How to read the data: `{"data.caption_column": "title"}`.
    before
        A model to compare with, for example the one that training started from.
    check
        Other images to compare both models on, to see what was forgotten: a folder or a table, or several.
    blend
        Write the best model between both into the run's folder `blended`, chosen on val.
    progress
        Show how far it is.
    yes
        Fetch a published model without asking.
    """
    with plain_thread(), _shown(progress) as shown:
        named = model_name(model)
        where = None if out is None else Path(out)
        _have(named if data is not None else None, shown, yes=yes)
        earlier = model_name(before)
        _have(earlier, shown, yes=yes)
        checks = [check] if isinstance(check, str | os.PathLike) else list(check)
        asked = asked_settings(data, settings, shown.data_progress if shown else None)
        source = asked.get("data.source")
        others = as_texts({name: value for name, value in asked.items() if name != "data.source"})
        request = EvaluationRequest(
            named,
            source,
            split,
            device,
            where,
            others,
            earlier,
            [os.fspath(check) for check in checks],
            blend,
        )
        counting = shown.counting("embedding images and captions") if shown else None
        with held(asked):
            return Evaluation(
                evaluating.evaluate(request, shown.data_progress if shown else None, counting)
            )


def tune(
    data: Data = None,
    *,
    recipe: str | None = None,
    seconds: float = 60.0,
    settings: Settings | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Find the fastest correct settings for a recipe on this machine, as `lapclip tune` does, and remember them for
    `lapclip.train`. Gives back what `lapclip tune --json` prints: `choices`, `reasons`, `pairs_per_second`.

    Parameters
    ----------
    data
        What to train on, in any form that `lapclip.train` takes.
    recipe
        A recipe's name or a TOML file; without it, the one that `lapclip.train` would take.
    seconds
        Time to spend. From 300 on, compiling is tried too.
    settings
        Settings that are not to be tuned: `{"train.device": "cpu"}`.
    progress
        Show what is being timed.
    """
    with _working(progress) as shown:
        asked = asked_settings(data, settings, shown.data_progress if shown else None)
        chosen = recipe_for(asked.get("data.source"), as_path(recipe))
        with held(asked):
            return tuning.tune(
                chosen, as_texts(asked), seconds, _callbacks(shown, CallbackListener(()))
            )


def export(
    model: Model | None = None,
    to: str = "onnx",
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: bool = True,
    yes: bool = False,
) -> dict[str, Any]:
    """Write a model as other programs load it, as `lapclip export` does, and check what that cost. Gives back what
    `lapclip export --json` prints: `files`, `bytes`, `recall_before`, `recall_after` and more.

    Parameters
    ----------
    model
        As for `lapclip.evaluate`.
    to
        The format: `onnx`, `onnx-int8`, `openclip` and others that `lapclip export --help` lists.
    out
        The folder to write; without one, `exported/FORMAT` in the run's folder.
    force
        Replace an earlier export there.
    progress
        Show how far it is.
    yes
        Fetch a published model without asking.
    """
    with plain_thread(), _shown(progress) as shown:
        named = model_name(model)
        where = None if out is None else Path(out)
        _have(named, shown, yes=yes)
        callbacks = (
            exporting.Callbacks(shown.doing, shown.data_progress, shown.counting) if shown else None
        )
        return exporting.export(
            named, to, where, force=force, callbacks=callbacks or exporting.Callbacks()
        )


def search(
    folder: str | os.PathLike[str],
    model: Model | None = None,
    *,
    device: str = "auto",
    progress: bool = True,
    yes: bool = False,
) -> FolderSearch:
    """Images on your own disk, to be asked what is on them. What is new or changed in the folder is indexed first, as
    `lapclip search` does, into the same index; nothing is written into the folder.

    Parameters
    ----------
    folder
        The images to search, with all folders in it.
    model
        As for `lapclip.evaluate`; without one, the model that made the index of this folder, else the finished run with
        the best recall on images.
    device
        `auto`, `cpu`, `cuda`, `mps` or `xpu`.
    progress
        Show how far it is.
    yes
        Fetch a published model without asking.

    For example:

        photos = lapclip.search("photos/")
        photos.ask("a red bicycle in the snow")
        photos.like("cat.jpg", limit=5)
    """
    with plain_thread(), _shown(progress) as shown:  # what is computed here stays in the index
        named = model_name(model)
        _have(named, shown, yes=yes)
        counting = shown.counting("indexing") if shown else None
        waiting = shown.waiting if shown else None
        return FolderSearch(
            open_library(Path(folder), named, counting, device=device, waiting=waiting)
        )


def _have(model: str | None, shown: Display | None, *, yes: bool) -> None:
    """Fetch the published model of that name, where it is not here yet."""
    have_model(model, yes=yes, counting=shown.counting if shown else None)
    if shown:
        shown.close()  # what was fetched is over, and there may be a question about the next one


def _callbacks(shown: Display | None, listener: CallbackListener) -> Callbacks:
    if shown is None:
        return Callbacks([listener], stop_reason=listener.stop_reason)
    return Callbacks(
        [shown, listener], shown.data_progress, shown.tuning_progress, listener.stop_reason
    )


def _ended(outcome: TrainOutcome) -> TrainingRun:
    """The run, where nobody has asked this process to end."""
    run = TrainingRun(outcome.run)
    if outcome.signal == signal.SIGINT:
        raise Interrupted(run, outcome.steps)
    if outcome.signal:
        raise SystemExit(128 + outcome.signal)
    return run


@contextmanager
def _shown(progress: bool) -> Iterator[Display | None]:
    """Where progress is shown, if anywhere."""
    if not progress:
        yield None
        return
    with display() as shown:
        yield shown


@contextmanager
def _working(progress: bool) -> Iterator[Display | None]:
    """Train or tune alone in this process, and leave torch as it was: a notebook goes on with other things."""
    if under_torchrun():
        raise ConfigError("lapclip.train is for one process.", hint="torchrun ... -m lapclip train")
    if not _at_work.acquire(blocking=False):
        raise RunBusy(
            "Another thread of this process trains or tunes already, and torch has one number of threads for all.",
            hint=f"one after the other, or {command('train')} in a process of its own",
        )
    try:
        with torch_kept(), plain_thread(), _shown(progress) as shown:
            compute_in_float32()
            yield shown
    finally:
        _at_work.release()

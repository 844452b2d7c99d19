"""Which model is meant: what a user typed after a command, turned into one answer. No torch: nothing is opened.

A model may be a run by its name or path, a folder or a file with a model, a folder that `lapclip export` wrote, a
published model by its short name, or a name on the Hugging Face hub, as hf:org/name. A run's model wins over one at a
path of the same name, and both over a published one. Without a name each command has one rule, which its help states.

`eval`, `export` and `report` take `newest_run`: they are typed after training and are about the run that was
just trained, good or bad; a run that failed before it had a model is passed over. `search` is about photos, not about a run: it takes the model that made the index of the
folder (`that_made_an_index`), because all images would have to be read again for another one, and where there is no
index the newest run that learned from images (`newest_on_photos`). `embed` does the same with the file it is to write.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lapclip.config import SECTIONS, Config, DataConfig, Layer, build_config
from lapclip.errors import RunError, closest
from lapclip.machine.facts import accelerators
from lapclip.machine.system_memory import available_bytes
from lapclip.model.shapes import SHAPES
from lapclip.paths import cache_folder
from lapclip.progress import Progress
from lapclip.runs.folder import REQUEST, RUNS, Run, all_runs, find_run, find_trained_run
from lapclip.runs.heartbeat import using
from lapclip.text import path_from_here, size
from lapclip.weights import is_model, published_models
from lapclip.weights.published_models import PublishedModel

ASKED = "asked for"
MADE_THE_INDEX = "it made the index of this folder"
DRAWN = DataConfig().source
"""The data of a run that saw nothing but drawn scenes."""


class NotAModel(RunError):
    """What was named is there, and is no model."""


class NoModel(RunError):
    """Nothing was named, and there is no model of a run."""


@dataclass(frozen=True)
class WhichModel:
    """The model that is meant."""

    path: Path
    """What opens it: a run's folder, a model's folder or file, an exported folder, a short name, or one on the hub."""
    run: Run | None
    """The run whose trained model it is; None for every other model, also for others in a run's folder."""
    why: str
    """Why this one: "asked for", or the rule that chose it."""

    @property
    def name(self) -> str:
        """What to call it."""
        run = self.made_by
        return run.name if run else str(self.path)

    @property
    def published(self) -> PublishedModel | None:
        """The published model that it is, by its short name."""
        return None if self.path.exists() else published_models.find(self.path.as_posix())

    @property
    def made_by(self) -> Run | None:
        """The run it comes from: its own, or the one in whose folder it lies, as runs/NAME/model and
        runs/NAME/exported/onnx do."""
        if self.run is not None:
            return self.run
        above = self.path.absolute().parents[:2]
        return next((Run(folder) for folder in above if (folder / "run.toml").exists()), None)

    def in_use(self) -> AbstractContextManager[object]:
        """Mark the run that it comes from as used, so that `lapclip clean` does not remove it."""
        return using(self.made_by.path) if self.made_by else nullcontext()

    @property
    def reference(self) -> str:
        """A path that leads there from every folder, for settings; the name of a published model as it is."""
        return os.path.abspath(self.path) if self.path.exists() else self.path.as_posix()

    @cached_property
    def config(self) -> Config | None:
        """The configuration of its run; None where there is no run."""
        if self.run is None:
            return None
        saved = self.run.read_settings()
        layer = Layer(
            str(self.run.settings), {section: saved.get(section, {}) for section in SECTIONS}
        )
        return build_config([layer], SHAPES)

    @cached_property
    def data_fingerprint(self) -> str | None:
        """The fingerprint of the data that its run began with; None where that is not known."""
        return self.run.read_settings()["run"].get("data_fingerprint") if self.run else None


def which_model(
    name: str | None, without_name: Callable[[], WhichModel] | None = None
) -> WhichModel:
    """The model of that name; without a name, what the rule `without_name` chooses, which is the newest run."""
    if name is None:
        return (without_name or newest_run)()
    if _is_run(RUNS / name) and not is_model(RUNS / name):
        raise _without_model(
            Run(RUNS / name)
        )  # a model of that name elsewhere is not what a run's name means
    for path in (RUNS / name, Path(name)):
        if path.exists() and is_model(path):
            return WhichModel(path, Run(path) if _is_run(path) else None, ASKED)
    if is_model(name):
        return WhichModel(Path(name), None, ASKED)  # published: by its short name, or on the hub
    for path in (RUNS / name, Path(name)):
        if _is_run(path):
            raise _without_model(Run(path))
    if Path(name).exists():
        raise NotAModel(
            f"{name} holds no model that lapclip reads.",
            hint="lapclip runs, or a model by its path",
        )
    if Path(name).name != name:
        raise RunError(f"There is no model at {name}.", hint="lapclip runs, or a model by its path")
    if close := closest(name, published_models.MODELS):
        raise RunError(
            f"There is no run, no file and no published model called {name}. Did you mean {close}?",
            hint="lapclip models, or lapclip runs",
        )
    find_run(name)  # says which runs there are
    raise RunError(f"{RUNS / name} holds no model that lapclip reads.", hint="lapclip runs")


def have_model(
    name: str | None, *, yes: bool, counting: Callable[[str], Progress] | None = None
) -> None:
    """Fetch the published model that a name means, where it is not here yet, before a command begins with anything."""
    if name is None or (RUNS / name).exists() or Path(name).exists():
        return
    model = published_models.find(name)
    if model is not None:
        fetch_once(model, yes=yes, counting=counting)


def fetch_once(
    model: PublishedModel, *, yes: bool, counting: Callable[[str], Progress] | None = None
) -> None:
    """Fetch a published model, where it is not here yet. `counting` is given what is fetched, and gives the callback
    that is told how much of it has come; without it nothing is shown."""
    if not model.is_cached:
        published_models.fetch(
            model, yes=yes, progress=counting(f"fetching {model.name}, MB") if counting else None
        )


def start_setting(start: str | None) -> list[str]:
    """The model to start from as a setting."""
    return [] if start is None else [f"train.start={_quoted(which_model(start).reference)}"]


def teacher_setting(teacher: str | None) -> list[str]:
    """The teacher as a setting: a model, or a file of embeddings."""
    if teacher is None:
        return []
    is_file = Path(teacher).suffix.lower() in (".npy", ".parquet")
    return [
        f"train.teacher={_quoted(os.path.abspath(teacher) if is_file else which_model(teacher).reference)}"
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def published_for_here() -> PublishedModel | None:
    """The published model that finds most, of those that this computer has the memory and the disk for."""
    there = next(
        path for path in (cache_folder(), *cache_folder().absolute().parents) if path.exists()
    )
    return published_models.best_that_fits(
        available_bytes(), shutil.disk_usage(there).free, accelerator=bool(accelerators())
    )


def for_photos(again: str = "--model") -> str:
    """What to try where there is no model that knows photos; `again` is the command up to the model's name."""
    trained = "lapclip train PHOTOS_WITH_CAPTIONS"
    if (best := published_for_here()) is None:
        return trained
    fetched = "which is here" if best.is_cached else f"{size(best.bytes)} to fetch once"
    return f"{again} {best.name} ({fetched}; lapclip models lists others), or {trained}"


def newest_run() -> WhichModel:
    """Return the model of the run that was started last, of those that have a model."""
    run = find_trained_run()
    if not is_model(run.path):
        raise _without_model(run)
    return WhichModel(run.path, run, "the newest run with a model")


def that_made_an_index(reference: str) -> WhichModel | None:
    """The model that an index names as its maker; None where it is gone."""
    if not is_model(reference):
        return None
    path = Path(path_from_here(reference))
    return WhichModel(path, Run(path) if _is_run(path) else None, MADE_THE_INDEX)


def newest_on_photos() -> WhichModel:
    """Return the newest finished run that learned from images.

    Without one, takes the newest run that learned from images, the newest finished run, or the newest run.
    """
    runs = runs_with_models()
    if not runs:
        raise NoModel(f"There is no trained model in {RUNS.absolute()}.", hint=for_photos())
    photos = [run for run in runs if run.data_source() not in (DRAWN, None)]
    groups = {
        "the newest finished run that learned from images": finished(photos),
        "the newest run that learned from images; none has finished": photos,
        "the newest finished run; none learned from images": finished(runs),
        "the newest run with a model; none has finished": runs,
    }
    reason, group = next((reason, group) for reason, group in groups.items() if group)
    return WhichModel(group[0].path, group[0], reason)


def finished(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.last_ending().get("type") == "finished"]


def runs_with_models() -> list[Run]:
    """Runs in this folder whose model can be used, the newest first."""
    return [run for run in reversed(all_runs()) if is_model(run.path)]


def _is_run(path: Path) -> bool:
    return (path / "run.toml").exists() or (path / REQUEST).exists()


def _without_model(run: Run) -> RunError:
    """What is known of a run that has no model, as before its first evaluation."""
    run.read_settings()  # says that it is still starting, or did not start
    return RunError(f"{run.path} holds no trained model; it is {run.state}.", hint="lapclip runs")

"""Which model is meant: what a user typed after a command, turned into one answer. No torch: nothing is opened.

A model may be a run by its name or path, a folder or a file with a model, a folder that `lapclip export` wrote, or a
name on the Hugging Face hub, as hf:org/name. A run's model wins over one at a path of the same name. Without a name
each command has one rule, which its help states: `newest_run` or `newest_that_saw_images`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lapclip.config import SECTIONS, Config, DataConfig, Layer, build_config
from lapclip.errors import RunError
from lapclip.model.shapes import SHAPES
from lapclip.runs.folder import RUNS, Run, all_runs, find_run
from lapclip.weights.recognise import is_model

ASKED = "asked for"
PRETRAINED = "lapclip train PHOTOS_WITH_CAPTIONS --recipe heads, or --model PATH of any published CLIP"
"""What to try where there is no model that knows photos."""
DRAWN = DataConfig().source
"""The data of a run that saw nothing but drawn scenes."""


class NotAModel(RunError):
    """What was named is there, and is no model."""


@dataclass(frozen=True)
class WhichModel:
    """The model that is meant."""

    path: Path
    """What opens it: a run's folder, a model's folder or file, an exported folder, or a name on the hub."""
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
    def made_by(self) -> Run | None:
        """The run it comes from: its own, or the one in whose folder it lies, as runs/NAME/model and
        runs/NAME/exported/onnx do."""
        if self.run is not None:
            return self.run
        above = self.path.absolute().parents[:2]
        return next((Run(folder) for folder in above if (folder / "run.toml").exists()), None)

    @property
    def reference(self) -> str:
        """A path that leads there from every folder, for settings; a hub's name as it is."""
        return os.path.abspath(self.path) if self.path.exists() else self.path.as_posix()

    @cached_property
    def config(self) -> Config | None:
        """The configuration of its run; None where there is no run."""
        if self.run is None:
            return None
        saved = self.run.read_settings()
        layer = Layer(str(self.run.settings), {section: saved.get(section, {}) for section in SECTIONS})
        return build_config([layer], SHAPES)

    @cached_property
    def data_fingerprint(self) -> str | None:
        """The fingerprint of the data that its run began with; None where that is not known."""
        return self.run.read_settings()["run"].get("data_fingerprint") if self.run else None


def which_model(name: str | None, without_name: Callable[[], WhichModel] | None = None) -> WhichModel:
    """The model of that name; without a name, what the rule `without_name` chooses, which is the newest run."""
    if name is None:
        return (without_name or newest_run)()
    if _is_run(RUNS / name) and not is_model(RUNS / name):
        raise _without_model(Run(RUNS / name))  # a model of that name elsewhere is not what a run's name means
    for path in (RUNS / name, Path(name)):
        if path.exists() and is_model(path):
            return WhichModel(path, Run(path) if _is_run(path) else None, ASKED)
    if is_model(name):
        return WhichModel(Path(name), None, ASKED)  # on the hub
    for path in (RUNS / name, Path(name)):
        if _is_run(path):
            raise _without_model(Run(path))
    if Path(name).exists():
        raise NotAModel(f"{name} holds no model that lapclip reads.", hint="lapclip runs, or a model by its path")
    if Path(name).name != name:
        raise RunError(f"There is no model at {name}.", hint="lapclip runs, or a model by its path")
    find_run(name)  # says which runs there are
    raise RunError(f"{RUNS / name} holds no model that lapclip reads.", hint="lapclip runs")


def newest_run() -> WhichModel:
    """The rule of `eval`, `gained`, `export` and `report`: the run that was started last."""
    run = find_run(None)
    if not is_model(run.path):
        raise _without_model(run)
    return WhichModel(run.path, run, "the newest run")


def newest_that_saw_images() -> WhichModel:
    """The rule of `search`: the newest finished run that learnt from images, else the newest finished run, else the
    newest with a model. A model that saw photos is fitter to find them than one that saw drawings and is newer."""
    runs = [run for run in reversed(all_runs()) if is_model(run.path)]
    finished = [run for run in runs if run.last_state() == "finished"]
    for run in finished:
        if run.data_source() not in (DRAWN, None):
            return WhichModel(run.path, run, "the newest finished run that learnt from images")
    if finished:
        return WhichModel(finished[0].path, finished[0], "the newest finished run")
    if runs:
        return WhichModel(runs[0].path, runs[0], "the newest run with a model; none has finished")
    raise RunError(f"There is no trained model in {RUNS.absolute()}.", hint=PRETRAINED)


def _is_run(path: Path) -> bool:
    return (path / "run.toml").exists() or (path / "starting").exists()


def _without_model(run: Run) -> RunError:
    """What is known of a run that has no model, as before its first evaluation."""
    run.read_settings()  # says that it is still starting, or did not start
    return RunError(f"{run.path} holds no trained model; it is {run.state}.", hint="lapclip runs")

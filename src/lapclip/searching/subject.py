"""Which model is meant, and what its run tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.data.loading import SCENES
from lapclip.errors import LapclipError, RunError
from lapclip.runs.event_log import read_events
from lapclip.runs.folder import RUNS, Run, all_runs, find_run
from lapclip.weights import is_model

PRETRAINED = "lapclip train PHOTOS_WITH_CAPTIONS --recipe heads, or --model PATH of any published CLIP"


@dataclass(frozen=True)
class Subject:
    """A model, and the run it comes from where there is one."""

    path: Path
    run: Run | None
    why: str
    """Why this one."""

    @property
    def name(self) -> str:
        return self.run.name if self.run else str(self.path)


def choose_subject(model: str | None) -> Subject:
    """The model of that name; without one the newest finished run that learnt from images, else from scenes."""
    if model is None:
        return _newest()
    a_run = (RUNS / model / "run.toml").exists() or (Path(model) / "run.toml").exists()
    if is_model(model) and not a_run:
        above = Path(model).absolute().parents  # runs/NAME/model is a run's, and so is runs/NAME/exported/onnx
        run = next((Run(folder) for folder in above[:2] if (folder / "run.toml").exists()), None)
        return Subject(Path(model), run, "asked for")
    if Path(model).is_file():
        raise RunError(f"{model} is no model that lapclip reads.", hint=PRETRAINED)
    run = find_run(model)
    if not is_model(run.path):
        raise RunError(f"{run.path} holds no model (yet).", hint="lapclip runs")
    return Subject(run.path, run if run.settings.exists() else None, "asked for")


def _newest() -> Subject:
    """A model that saw images is fitter to find them than one that saw drawings, though that may be newer."""
    runs = [run for run in reversed(all_runs()) if is_model(run.path)]
    finished = [run for run in runs if run.last_state() == "finished"]
    for run in finished:
        if source_of(run) not in (SCENES, None):
            return Subject(run.path, run, "the newest finished run that learnt from images")
    if finished:
        return Subject(finished[0].path, finished[0], "the newest finished run")
    if runs:
        return Subject(runs[0].path, runs[0], "the newest run with a model; none has finished")
    raise RunError(f"There is no trained model in {RUNS.absolute()}.", hint=PRETRAINED)


def source_of(run: Run) -> str | None:
    """What a run learnt from; None where its settings cannot be read."""
    try:
        return str(run.read_settings().get("data", {}).get("source"))
    except LapclipError:
        return None


def history(run: Run) -> tuple[int | None, dict[str, Any] | None]:
    """How many images a run learnt from, and its last scores on those held out; None where it does not say."""
    images, scores = None, None
    for event in read_events(run.events):
        if event["type"] == "started":
            images = (event.get("pairs") or {}).get("train", images)
        elif event["type"] in ("evaluation", "finished") and event.get("evaluation"):
            scores = event["evaluation"]
    return images, scores

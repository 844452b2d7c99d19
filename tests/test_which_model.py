"""Which model is meant by what a user typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lapclip.errors import RunError
from lapclip.report import write_report
from lapclip.runs.events import EventLog, Finished
from lapclip.runs.folder import Run, TrainRequest, create_run, find_run
from lapclip.which_model import NotAModel, newest_on_photos, which_model

from .small_runs import prepared_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model_at(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def make_run(
    name: str,
    source: str = "scenes",
    *,
    age: int = 0,
    model: bool = True,
    finished: bool = True,
) -> Run:
    run = prepared_run(
        name,
        {"run": {"format": 1, "data_fingerprint": f"of {name}"}, "data": {"source": source}},
    )
    os.utime(run.settings, (1e9 - age, 1e9 - age))
    if model:
        model_at(run.model)
    if finished:
        with_end = Finished(
            step=1,
            training_seconds=1,
            pairs_per_second=1,
            peak_memory_bytes=1,
            evaluation={},
            places=[],
            early="",
        )
        log = EventLog(run.events)
        log.append(with_end)
        log.close()
    return run


def test_a_run_is_known_by_its_name_and_by_its_path(here: Path) -> None:
    make_run("mine")
    for name in ("mine", "runs/mine", str(here / "runs" / "mine")):
        found = which_model(name)
        assert found.run is not None
        assert (found.run.name, found.name, found.why) == ("mine", "mine", "asked for")
        assert found.reference == str(here / "runs" / "mine")
        assert found.config is not None
        assert (found.config.data.source, found.data_fingerprint) == ("scenes", "of mine")


def test_a_runs_name_wins_over_a_path_of_the_same_name(here: Path) -> None:
    make_run("mine")
    model_at(here / "mine")
    assert which_model("mine").path == Path("runs/mine")
    assert which_model(str(here / "mine")).run is None


def test_a_model_in_a_runs_folder_is_not_its_trained_model_but_comes_from_it(here: Path) -> None:
    run = make_run("mine")
    exported = run.path / "exported" / "onnx"
    exported.mkdir(parents=True)
    (exported / "lapclip.json").write_text("{}")
    for path in (model_at(run.start), exported):
        found = which_model(str(path))
        assert (found.path, found.run, found.config, found.data_fingerprint) == (
            path,
            None,
            None,
            None,
        )
        assert found.made_by is not None
        assert found.name == "mine"


def test_models_of_others_have_no_run(here: Path) -> None:
    model_at(here / "theirs")
    (here / "ViT.pt").write_bytes(b"x")
    for name in ("theirs", "ViT.pt", "openai/clip-vit-base-patch32"):
        found = which_model(name)
        assert (str(found.path), found.run, found.made_by, found.config) == (name, None, None, None)
    assert which_model("openai/clip-vit-base-patch32").reference == "openai/clip-vit-base-patch32"
    assert which_model("ViT.pt").reference == str(here / "ViT.pt")


def test_what_is_no_model_is_said_so(here: Path) -> None:
    (here / "photos").mkdir()
    (here / "a.csv").touch()
    make_run("young", model=False, finished=False)
    create_run("waiting", "r", TrainRequest("r"))
    for name in ("photos", "a.csv"):
        with pytest.raises(NotAModel, match=f"{name} holds no model"):
            which_model(name)
    with pytest.raises(RunError, match=r"young holds no trained model; it is died"):
        which_model("young")
    with pytest.raises(RunError, match=r"No run called yung .*\. Did you mean young\?"):
        which_model("yung")
    with pytest.raises(RunError, match=r"no model at photos/gone\.pt"):
        which_model("photos/gone.pt")
    with pytest.raises(RunError, match="waiting is still starting"):
        which_model("waiting")


def test_without_a_name_the_newest_run_with_a_model_is_meant_good_or_bad() -> None:
    with pytest.raises(RunError, match="There are no runs"):
        which_model(None)
    make_run("photos", "photos", age=2)
    make_run("scenes", age=1)
    assert which_model(None).name == "scenes"
    make_run("failed", model=False, finished=False)
    create_run("refused", "r", TrainRequest("r"))
    assert find_run(None).name == "refused"
    assert which_model(None).name == "scenes"
    (files, _) = write_report(None, None)
    assert files[0].parent.name == "scenes"


def test_search_takes_the_newest_run_that_learned_from_images() -> None:
    def chosen() -> tuple[str, str]:
        match = which_model(None, newest_on_photos)
        return match.name, match.why

    with pytest.raises(RunError, match="no trained model"):
        chosen()
    make_run("unfinished-scenes", finished=False)
    assert chosen() == ("unfinished-scenes", "the newest run with a model; none has finished")
    make_run("scenes", age=9)
    assert chosen() == ("scenes", "the newest finished run; none learned from images")
    make_run("unfinished", "photos", age=1, finished=False)
    assert chosen()[0] == "unfinished"
    make_run("old", "photos", age=8)
    make_run("heads", "photos", age=7)
    make_run("without", "photos", age=0, model=False)
    assert chosen() == ("heads", "the newest finished run that learned from images")


def test_torch_is_not_loaded() -> None:
    code = "import sys, lapclip.which_model; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

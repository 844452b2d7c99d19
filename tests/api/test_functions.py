"""Evaluating, exporting, searching and tuning from Python: the same as the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import lapclip
from lapclip.errors import ConfigError, RunError, SearchError
from lapclip.weights import published_models

from ..conftest import lapclip as run_command
from ..conftest import lapclip_process
from .test_train import SETTINGS, wall_pairs


@pytest.fixture
def run(here: Path, trained: Path) -> lapclip.TrainingRun:
    shutil.copytree(trained, here / "runs" / "mine")
    return lapclip.open_run()


def test_an_evaluation_is_what_the_command_prints(run: lapclip.TrainingRun, here: Path) -> None:
    found = lapclip.evaluate(run, split="val", device="cpu", progress=False)
    printed = json.loads(
        run_command("eval", "mine", "--split", "val", "--device", "cpu", "--json").stdout
    )
    assert found.metrics == printed["evaluation"]
    assert found["short_questions"] == printed["short_questions"]
    assert "split val" in repr(found)
    assert "R@1" in found._repr_html_()
    other = lapclip.evaluate(run, wall_pairs(here / "walls"), split="all", progress=False)
    assert other.metrics["candidates"] == 40
    with pytest.raises(RunError, match="nowhere"):
        lapclip.evaluate("nowhere", progress=False)


def test_a_model_that_was_loaded_is_taken_where_a_name_is(
    run: lapclip.TrainingRun, here: Path
) -> None:
    model = lapclip.load("mine")
    assert Path(model.source) == Path("runs/mine")
    by_name = lapclip.evaluate("mine", split="val", progress=False)
    assert lapclip.evaluate(model, split="val", progress=False).metrics == by_name.metrics
    assert isinstance(model, lapclip.Embedder)
    with torch.no_grad():
        model.model.logit_scale.add_(1)
    with pytest.raises(ConfigError, match="has changed"):  # the file would be scored, not this
        lapclip.export(model, progress=False)
    model.source = ""
    with pytest.raises(ConfigError, match="in no file"):
        lapclip.search(here, model, progress=False)
    with pytest.raises(RunError, match="Did you mean mine"):
        lapclip.load("mime")


def test_without_progress_nothing_is_printed_while_a_model_is_fetched(
    here: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[bool] = []

    def fetch(model: Any, *, yes: bool, progress: Any) -> None:
        told.append(progress is not None)
        if progress:
            progress(1, 2)
        raise SearchError("no network here")

    monkeypatch.setattr(published_models, "fetch", fetch)
    for progress in (False, True):
        with pytest.raises(SearchError):
            lapclip.search(here, "vit-b-32-openai", progress=progress, yes=True)
        assert ("fetching" in capsys.readouterr().err) == progress
    assert told == [False, True]


def test_a_folder_is_asked_and_answers_with_images(
    run: lapclip.TrainingRun, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPCLIP_DATA", str(here / "indexes"))
    (here / "photos").mkdir()
    for name in ("red", "green", "blue"):
        Image.new("RGB", (40, 30), name).save(here / "photos" / f"{name}.png")
    with lapclip.search("photos", run, progress=False) as photos:
        assert len(photos) == 3
        assert "3 images" in repr(photos)
        assert any("drawn scenes" in note for note in photos.notes)
        found = photos.ask("a red cat", limit=2)
        assert len(found) == 2
        assert found[0].score >= found[1].score
        printed = json.loads(
            run_command("search", "photos", "a red cat", "--limit", "2", "--json").stdout
        )
        assert [str(path) for path in found.paths] == [hit["path"] for hit in printed["results"]]
        assert found._repr_html_().count("data:image/jpeg;base64,") == 2
        assert photos.like(Image.new("RGB", (40, 30), "blue"), limit=1).paths == [
            here / "photos" / "blue.png"
        ]
        with pytest.raises(SearchError):
            photos.ask("a cat", limit=0)
        with pytest.raises(SearchError):
            photos.ask("a cat", since="someday")
        with pytest.raises(SearchError):
            photos.like(found.paths[0], limit=-1)
        assert len(photos.ask("a cat", exclude="red.*")) == 2
    assert "closed" in repr(photos)
    with pytest.raises(SearchError, match="closed"):
        photos.ask("a cat")


def test_data_in_memory_stays_while_it_is_scored(
    run: lapclip.TrainingRun, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, left = wall_pairs(here / "walls"), []
    for image, _ in pairs:
        image.load()  # else its path would do

    def cleaned(request: Any, *rest: Any) -> dict[str, Any]:
        lapclip_process("clean", "--caches", "--yes")
        left.append(Path(request.data).is_dir())
        return {"evaluation": {"t2i_r1": 0.5}, "run": "run", "data": request.data, "split": "all"}

    monkeypatch.setattr("lapclip.commands.evaluate.evaluate", cleaned)
    found = lapclip.evaluate(run, pairs, progress=False)
    assert left == [True]
    assert run_command("clean", "--caches", "--yes").returncode == 0
    assert not Path(found["data"]).exists(), "nobody works with it any more"


def test_an_index_does_not_depend_on_what_a_program_does_around_the_call(
    run: lapclip.TrainingRun, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "photos").mkdir()
    Image.linear_gradient("L").save(here / "photos" / "one.png")
    scores = []
    for how in (False, True):
        monkeypatch.setenv("LAPCLIP_DATA", str(here / f"indexes-{how}"))
        with torch.autocast("cpu", torch.bfloat16, enabled=how):
            photos = lapclip.search("photos", run, progress=False)
        scores.append(photos.ask("a red cat")[0].score)
        photos.close()
    assert scores[0] == scores[1]


@pytest.mark.slow
def test_an_export_is_checked_and_loads(run: lapclip.TrainingRun, here: Path) -> None:
    result = lapclip.export(run, "openclip", out=here / "exported", progress=False)
    assert result["format"] == "openclip"
    assert (here / "exported" / "README.md").exists()
    with pytest.raises(lapclip.LapclipError):
        lapclip.export(run, "openclip", out=here / "exported", progress=False)


@pytest.mark.slow
def test_what_is_tuned_is_what_the_command_would_tune(here: Path) -> None:
    found = lapclip.tune(settings=SETTINGS, seconds=3, progress=False)
    assert found["choices"]["device"] == "cpu"
    assert found["pairs_per_second"] > 0

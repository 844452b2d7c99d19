"""Evaluating, exporting, searching and tuning from Python: the same as the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

import lapclip
from lapclip.errors import RunError, SearchError

from ..conftest import lapclip as run_command
from .test_train import SETTINGS, wall_pairs


@pytest.fixture
def run(here: Path, trained: Path) -> lapclip.TrainingRun:
    shutil.copytree(trained, here / "runs" / "mine")
    return lapclip.open_run()


def test_an_evaluation_is_what_the_command_prints(run: lapclip.TrainingRun, here: Path) -> None:
    found = lapclip.evaluate(run, split="val", device="cpu", progress=False)
    printed = json.loads(run_command("eval", "mine", "--split", "val", "--device", "cpu", "--json").stdout)
    assert found.metrics == printed["evaluation"]
    assert found["short_questions"] == printed["short_questions"]
    assert "split val" in repr(found)
    assert "R@1" in found._repr_html_()
    other = lapclip.evaluate(run, wall_pairs(here / "walls"), split="all", progress=False)
    assert other.metrics["candidates"] == 40
    with pytest.raises(RunError, match="nowhere"):
        lapclip.evaluate("nowhere", progress=False)


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
        printed = json.loads(run_command("search", "photos", "a red cat", "--limit", "2", "--json").stdout)
        assert [str(path) for path in found.paths] == [hit["path"] for hit in printed["results"]]
        assert found._repr_html_().count("data:image/jpeg;base64,") == 2
        assert photos.like(Image.new("RGB", (40, 30), "blue"), limit=1).paths == [here / "photos" / "blue.png"]
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

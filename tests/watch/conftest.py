"""One server of the page for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .made import Served, server


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with server() as served:
            yield folder, served


@pytest.fixture
def served(served_folder: tuple[Path, Served], monkeypatch: pytest.MonkeyPatch) -> Served:
    """The server of a folder that the tests of a file share: each makes runs of its own names."""
    folder, served = served_folder
    monkeypatch.chdir(folder)
    return served

"""A short round of benchmarks/hostile_requests.py: generated requests to both pages, with their tokens and without."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lapclip.searching.library import open_library

from .watch.made import server

EXAMPLES = 60
"""Each goes to both pages, with the token and without it."""


@pytest.fixture(scope="module")
def requests() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "hostile_requests.py"
    spec = importlib.util.spec_from_file_location("hostile_requests", path)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look there
    spec.loader.exec_module(found)
    return found


def test_generated_requests_break_nothing_and_get_nothing_else(
    here: Path, requests: ModuleType, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPCLIP_DATA", str(here / "data"))
    monkeypatch.setattr(requests.watch_app, "PATIENCE", 60)  # it is set, and set back
    found = requests.Findings(requests.make_places(here))
    library = open_library(here / "photos", str(trained))
    with contextlib.closing(library), asyncio.Runner() as runner:
        requests.by_application(runner, requests.applications(library), EXAMPLES, found, 1)
    with server() as served:
        requests.by_socket({"watch": (served.port, served.token)}, EXAMPLES // 2, found, 2)
        assert served.ask("/runs").status == 200
    assert found.wrong == []
    assert sum(found.statuses.values()) == 4 * EXAMPLES + EXAMPLES
    # Some have reached what is served: else nothing was tried.
    assert found.statuses["watch with token: 200"]
    assert found.statuses["search with token: 200"]

"""Tunings that take little time, and a real one for the tests of this folder that only read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lapclip.machine import other_programs
from lapclip.tuning import model_size, tune
from lapclip.tuning.tune import Tuning

from .made import tuned


@pytest.fixture(scope="package", autouse=True)
def little_time() -> Iterator[None]:
    """A tiny model is timed well enough in a tenth of the usual time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "TIMED_SECONDS", tune.TIMED_SECONDS / 10)
        patch.setattr(model_size, "RATE_SECONDS", model_size.RATE_SECONDS / 10)
        yield


@pytest.fixture(scope="package")
def tuning(cache: Path, little_time: None) -> Tuning:
    """A real one, for those that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other_programs, "read_load", lambda: 0.0)
        return tuned()

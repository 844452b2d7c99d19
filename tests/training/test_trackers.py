from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lapclip.errors import ConfigError
from lapclip.runs.folder import Run

from ..conftest import SMALL
from ..small_runs import train


def test_tensorboard_reads_the_metrics_of_a_run(here: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train("first-run", [*SMALL, "track=tensorboard"], name="run")
    found = accumulator.EventAccumulator(str(here / "runs/run/tensorboard"))
    found.Reload()
    names = set(found.Tags()["scalars"])
    assert {
        "loss",
        "temperature",
        "gradient norm",
        "accuracy/text to image",
        "held out/t2i_r1",
    } <= names
    assert [scalar.step for scalar in found.Scalars("loss")] == list(range(1, 13))


def test_without_the_package_it_is_refused_before_a_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="needs the package tensorboard"):
        train("first-run", [*SMALL, "track=tensorboard"])
    assert Run(Path("runs/first-run")).never_began

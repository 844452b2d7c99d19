"""An objective with an extra input takes two files: its own, and the setting that switches it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.runs.events import read_events
from lapclip.runs.view import view_of

from ..changed_copy import ChangedCopy

OBJECTIVE = '''
from typing import ClassVar

import numpy as np

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, DrawnRows, Slicing
from lapclip.training.objectives.base import LossRows, Objective, Term


class Brightness(Objective):
    """The first number of an image's embedding is its brightness."""

    extras: ClassVar = {"brightness_B": Slicing.ROWS}
    metrics: ClassVar = {"brightness_loss": "How badly the brightness is known."}

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.weight = config.brightness

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        pixels = plan.pairs.pixels[drawn.rows]
        return {"brightness_B": (pixels.mean(axis=(1, 2, 3)) / 255).astype(np.float32)}

    def term(self, rows: LossRows) -> Term:
        error_R = rows.own["image"][:, 0] - rows.extras["brightness_B"]
        loss = (error_R**2).sum() / rows.size
        return Term(loss, {"brightness_loss": loss.detach()})
'''
SETTING = '''    brightness: float = setting(0.0, objective="brightness.Brightness")
    """Weight of the brightness of images."""
'''
BEFORE = "    symbol_dropout: float"


@pytest.mark.parametrize("extra", [[], ["train.micro_batch=6"]], ids=str)
def test_a_new_objective_takes_its_file_and_a_setting(tmp_path: Path, extra: list[str]) -> None:
    copy = ChangedCopy(tmp_path)
    copy.add("training/objectives/brightness.py", OBJECTIVE)
    copy.insert("config.py", BEFORE, SETTING)
    run = copy.train("train.brightness=20", "train.steps=30", *extra)
    assert len(copy.touched) == 2
    steps = [event for event in read_events(run.events) if event["type"] == "step"]
    assert len(steps) == 30
    assert steps[-1]["brightness_loss"] < 0.5 * steps[0]["brightness_loss"]
    assert view_of(run).metrics == {"brightness_loss": "How badly the brightness is known."}

"""What the tests of tuning share: a tiny configuration, a batch for it, and one real tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lapclip.config import Config, DataConfig, TrainConfig, replace_in
from lapclip.data.batches import Batch
from lapclip.model.shapes import SHAPES
from lapclip.tuning.rehearsal import Workload
from lapclip.tuning.tune import Tuner, Tuning

CONFIG = Config(model=SHAPES["tiny"], data=DataConfig(), train=TrainConfig(batch_size=8, steps=100))


def batch_of(rows: int = 8) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30, (rows, 16))
    tokens[:, 9] = 32
    pixels = draw.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(rows, dtype=bool), np.zeros(rows, dtype=bool))


class Clock:
    """A clock that moves when a test moves it, and by `tick` seconds with each look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def tuned(seconds: float = 3.0, *, briefly: bool = False, **train) -> Tuning:
    """Tune on a clock that stands still, so that a busy machine does not use up the budget."""
    config = replace_in(CONFIG, "train", **train)
    return Tuner(config, batch_of(), seconds, briefly=briefly, clock=Clock()).run()


PLAIN = TrainConfig(
    batch_size=4, dtype="float32", device="cpu", threads=1, compile="none", image_attention="fused",
    text_attention="fused", linear="torch",
)  # fmt: skip


def small(batch: int = 4, layers: int = 2, **changes: Any) -> Workload:
    shape = dataclasses.replace(SHAPES["tiny"], image_layers=layers, text_layers=layers)
    return Workload(shape, dataclasses.replace(PLAIN, batch_size=batch, **changes))

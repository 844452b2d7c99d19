"""What the tests of tuning share: a tiny configuration, a batch for it, and one real tuning."""

from __future__ import annotations

import dataclasses

import numpy as np

from lapclip.config import Config, DataConfig, TrainConfig, replace_in
from lapclip.data.batches import Batch
from lapclip.model.shapes import SHAPES
from lapclip.tuning.measure import Workload
from lapclip.tuning.search import Search, Tuning

CONFIG = Config(model=SHAPES["tiny"], data=DataConfig(), train=TrainConfig(batch_size=8, steps=100))


def batch_of(rows: int = 8) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30, (rows, 16))
    tokens[:, 9] = 32
    pixels = draw.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(rows, dtype=bool), np.zeros(rows, dtype=bool))


def tuned(seconds: float = 3.0, *, briefly: bool = False, **train) -> Tuning:
    return Search(replace_in(CONFIG, "train", **train), batch_of(), seconds, briefly=briefly).run()


PLAIN = TrainConfig(
    batch_size=4, dtype="float32", device="cpu", threads=1, compile="none", image_attention="fused",
    text_attention="fused", linear="torch",
)  # fmt: skip


def small(batch: int = 4, layers: int = 2, **changes: object) -> Workload:
    shape = dataclasses.replace(SHAPES["tiny"], image_layers=layers, text_layers=layers)
    return Workload(shape, PLAIN).changed(batch_size=batch, **changes)

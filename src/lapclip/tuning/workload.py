"""What is measured: a real training step on real images, small enough to be made in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np

from lapclip.config import AUTO, ModelConfig, TrainConfig
from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.dataset import Pairs
from lapclip.data.scenes import drawing
from lapclip.data.scenes import scene as scenes
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.machine.choose_device import choose_compile, default_threads
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.training.cuda_graph import AnyStep, make_step
from lapclip.training.step import StepMetrics
from lapclip.tuning.choose_kernels import choose_kernels

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained, with nothing left to choose."""

    shape: ModelConfig
    train: TrainConfig

    def changed(self, **changes: object) -> Workload:
        """The same with some settings of training changed; the form of each operation stays."""
        return replace(self, train=replace(self.train, **changes))  # pyright: ignore[reportArgumentType]


def make_workload(
    shape: ModelConfig, batch_size: int, device: Device, dtype: str = "float32", compile: str = "none"
) -> Workload:
    """The step as `lapclip train` would take it: each operation in the form that is fastest here."""
    tokenizer = CharacterTokenizer(scenes.ALPHABET)
    shape = replace(shape, vocabulary=tokenizer.vocabulary)
    how = choose_compile(AUTO, device)[0] if compile == AUTO else compile
    train = TrainConfig(
        batch_size=batch_size,
        dtype=dtype,
        device=device.kind,
        threads=default_threads(),
        loader_threads=1,
        compile=how,
        learning_rate=LEARNING_RATE,
    )
    captions = [row[0] for row in some_pairs(batch_size, shape.image_size).captions]
    forms, _ = choose_kernels(shape, train, tokenizer.batch(captions, shape.context).shape[1], device)
    return Workload(shape, replace(train, **forms))  # pyright: ignore[reportArgumentType]


@cache
def some_pairs(count: int, side: int) -> Pairs:
    """A few of the built-in images with a caption each."""
    rows = scenes.split_scenes(count, seed=0)["train"]
    draw = Random("captions of the microscope")
    pixels = np.stack([drawing.draw(scene, side, index) for index, scene in enumerate(rows)])
    return Pairs(pixels, [scenes.captions(scene, 1, draw) for scene in rows])


class Rehearsal:
    """A model in training that nobody keeps."""

    def __init__(self, workload: Workload, device: Device, pairs: int = 0) -> None:
        train = workload.train
        self.workload, self.device = workload, device
        chosen = some_pairs(max(pairs, train.batch_size), workload.shape.image_size)
        self.plan = BatchPlan(
            chosen, CharacterTokenizer(scenes.ALPHABET), workload.shape.context, train.batch_size, seed=0
        )
        self.step: AnyStep = make_step(CLIP(workload.shape, seed=1).to(device.torch), train, device)
        self.taken = 0

    def __call__(self, batch: Batch | None = None) -> StepMetrics:
        """One update on the given batch, or on the next of the plan. Reading its metrics waits for it."""
        return self.watched(Stopwatch(self.device.synchronise, on=False), batch)

    def watched(self, watch: Stopwatch, batch: Batch | None = None) -> StepMetrics:
        """The same, with its phases on a stopwatch."""
        self.taken += 1
        return self.step(batch or self.plan.batch(self.taken), self.taken, LEARNING_RATE, watch)()

    def repeated(self) -> Callable[[], StepMetrics]:
        """A step on one batch again and again, for timing: no shape changes and nothing is loaded."""
        batch = self.plan.batch(1)
        return lambda: self(batch)

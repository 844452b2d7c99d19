"""Real training steps of a model that nobody keeps, on built-in images: to be timed and watched."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np

from lapclip.config import AUTO, ModelConfig, TrainConfig
from lapclip.data import scenes
from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.dataset import Pairs
from lapclip.data.scenes import drawing
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.machine.choose_device import choose_compile, default_threads, prepare_device
from lapclip.machine.device import Device
from lapclip.measure.phases import PHASES, Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
from lapclip.training.feed import feed, ready
from lapclip.training.inputs import Sent
from lapclip.training.step import StepMetrics, TrainStep
from lapclip.tuning.kernels import choose_kernels

LEARNING_RATE = 1e-4
PHASES_MODEL = "mini"
PHASES_BATCH = 32
PHASES_STEPS = 5


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained, with nothing left to choose."""

    shape: ModelConfig
    train: TrainConfig


def make_workload(
    shape: ModelConfig,
    batch_size: int,
    device: Device,
    dtype: str = "float32",
    compile: str = "none",
) -> Workload:
    """Return the step that `lapclip train` would take, with the fastest form of each operation."""
    tokenizer = CharacterTokenizer(scenes.ALPHABET)
    shape = replace(shape, vocabulary=tokenizer.vocabulary)
    if compile == AUTO:
        compile, _ = choose_compile(AUTO, device)
    train = TrainConfig(
        batch_size=batch_size,
        device=device.kind,
        dtype=dtype,
        threads=default_threads(),
        loader_threads=1,
        compile=compile,
        learning_rate=LEARNING_RATE,
    )
    captions = [captions[0] for captions in some_pairs(batch_size, shape.image_size).captions]
    caption_tokens = tokenizer.batch(captions, shape.context).shape[1]
    forms, _ = choose_kernels(shape, train, caption_tokens, device)
    return Workload(shape, replace(train, **forms))


@cache
def some_pairs(count: int, side: int) -> Pairs:
    """Draw some of the built-in images, with a caption each."""
    rows = scenes.split_scenes(count, seed=0)["train"]
    draw = Random("captions of the microscope")
    pixels = np.stack([drawing.draw(scene, side, index) for index, scene in enumerate(rows)])
    return Pairs(pixels, [scenes.captions(scene, 1, draw) for scene in rows])


class Rehearsal:
    """A model in training. Each step is one update."""

    def __init__(self, workload: Workload, device: Device, pairs: int = 0) -> None:
        train, shape = workload.train, workload.shape
        self.device = device
        self.plan = BatchPlan(
            some_pairs(max(pairs, train.batch_size), shape.image_size),
            CharacterTokenizer(scenes.ALPHABET),
            shape.context,
            train.batch_size,
            seed=0,
        )
        model = CLIP(shape, seed=1).to(device.torch)
        self.step: TrainStep = make_step(model, train, device)
        self.steps_taken = 0

    def step_once(
        self, batch: Batch | Sent | None = None, stopwatch: Stopwatch | None = None
    ) -> StepMetrics:
        """Take one step on this batch, or on the next of the plan, and wait for it."""
        stopwatch = stopwatch or Stopwatch(self.device.synchronise, on=False)
        self.steps_taken += 1
        batch = batch or self.plan.batch(self.steps_taken)
        return self.step(batch, self.steps_taken, LEARNING_RATE, stopwatch)()

    def repeat_batch(self) -> Callable[[], StepMetrics]:
        """Return a step on one batch, for timing: shapes stay the same and nothing is loaded."""
        batch = ready(self.step, self.plan.batch(1), 1)
        return lambda: self.step_once(batch)

    def time_phases(self, steps: int) -> dict[str, float]:
        """Return the median seconds of each phase, with batches prepared ahead as in training."""
        measured_steps = []
        with feed(self.plan, self.step, 1, 1 + steps) as batches:
            for _ in range(1 + steps):
                stopwatch = Stopwatch(self.device.synchronise, on=True)
                with stopwatch.phase("load"):
                    batch = next(batches)
                self.step_once(batch, stopwatch)
                if stopwatch.seconds is not None:
                    measured_steps.append(stopwatch.seconds)
        measured_steps = measured_steps[1:] or measured_steps  # the first step sets things up
        return {
            phase: statistics.median(seconds[phase] for seconds in measured_steps)
            for phase in PHASES
        }


def measure_phases(device: Device) -> dict[str, float]:
    """Return the seconds of each phase of a training step of a small model on a device."""
    prepare_device(device, default_threads())
    workload = make_workload(SHAPES[PHASES_MODEL], PHASES_BATCH, device)
    return Rehearsal(workload, device, pairs=4 * PHASES_BATCH).time_phases(PHASES_STEPS)

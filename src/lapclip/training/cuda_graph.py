"""A whole update recorded once and replayed: at small batches an accelerator spends most of its time on launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.transfer import Delivered, Layout
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.training.inputs import Inputs, Sent
from lapclip.training.optimizer import make_optimizer
from lapclip.training.step import StepMetrics, TrainStep

WARM_UP = 3
"""Real steps taken without a recording first, so that libraries have set themselves up."""


def make_step(model: CLIP, config: TrainConfig, device: Device) -> AnyStep:
    """A step with its optimiser, sent to the device as the configuration says."""
    compute = Compute(DTYPES[config.dtype], linear=config.linear, recompute=config.recompute)
    model.compute_with(
        image=replace(compute, attention=config.image_attention),
        text=replace(compute, attention=config.text_attention),
    )
    step = TrainStep(model, make_optimizer(model, config, device), config, device)
    if "compiled" in config.compile:
        if device.is_deterministic:
            torch.use_deterministic_algorithms(
                True
            )  # as `prepare_device` did, and the compiler is told too
        step.worker.image.compile()
        step.worker.text.compile()
    return GraphedStep(step) if "graph" in config.compile else step


@dataclass(frozen=True)
class Recording:
    """A graph with the memory it reads from and writes to."""

    replay: Callable[[], None]
    batch: Delivered
    metrics: Tensor


class GraphedStep:
    """Stands in for a TrainStep. One recording for each shape of its inputs, in one shared pool of memory."""

    def __init__(self, step: TrainStep) -> None:
        self.step, self.parts = step, step.parts
        self.model, self.optimizer, self.others = step.model, step.optimizer, step.others
        self.worker, self.device, self.boundaries = step.worker, step.device, step.boundaries
        self._taken = 0
        self._recorder = step.device.graph_recorder()
        self._recordings: dict[tuple, Recording] = {}
        self._off = Stopwatch(step.device.synchronise, on=False)

    def __call__(
        self, batch: Batch | Sent, step: int, lr: float, watch: Stopwatch
    ) -> Callable[[], StepMetrics]:
        """Update the model, as TrainStep does. A recording has no inside, so there are no phases to measure."""
        self._taken += 1
        if self._taken <= WARM_UP:
            return self._recorder.warm_up(lambda: self.step(batch, step, lr, watch))
        watch.discard()
        with self.step.received(batch, step) as (inputs, delivered):
            key = inputs.side, Layout.of(delivered.tensors)
            if key not in self._recordings:
                self._recordings[key] = self._record(inputs, delivered)
            recording = self._recordings[key]
            recording.batch.fill(delivered)  # behind the replay that still reads the batch before
        self.step.set_learning_rate(lr)
        self.step.touched = True
        recording.replay()
        return self.step.reader(recording.metrics)

    @property
    def sends_ahead(self) -> bool:
        """Whether another thread may `send` a batch while the device works on the one before."""
        return self.step.sends_ahead

    def send(self, batch: Batch, step: int) -> Sent:
        """Start to bring a batch to the device, as TrainStep does."""
        return self.step.send(batch, step)

    @property
    def touched(self) -> bool:
        """Whether the weights may have changed since the loop last checked."""
        return self.step.touched

    @touched.setter
    def touched(self, touched: bool) -> None:
        self.step.touched = touched

    def _record(self, inputs: Inputs, delivered: Delivered) -> Recording:
        """Recording computes nothing, so the weights are as they were."""
        held = delivered.copy()
        self.step.optimizer.zero_grad(
            set_to_none=True
        )  # gradients are to live in the graph's own memory
        replay, metrics = self._recorder.record(
            lambda: self.step.update(replace(inputs, **held.tensors), self._off)
        )
        return Recording(replay, held, metrics)


AnyStep = TrainStep | GraphedStep

"""Training steps that are recorded once and replayed, because small batches are bound by
launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.transfer import Delivered, Layout
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.training.inputs import Inputs, Sent
from lapclip.training.optimizer import make_optimizer
from lapclip.training.step import DeviceMetrics, StepMetrics, TrainStep

WARM_UP = 3  # steps before the first recording, in which libraries initialize themselves


def make_step(model: CLIP, config: TrainConfig, device: Device) -> TrainStep:
    """Return a training step with its optimizer, recorded or compiled if the settings say so."""
    compute = Compute(DTYPES[config.dtype], linear=config.linear, recompute=config.recompute)
    model.compute_with(
        image=replace(compute, attention=config.image_attention),
        text=replace(compute, attention=config.text_attention),
    )
    step_class = GraphedStep if "graph" in config.compile else TrainStep
    step = step_class(model, make_optimizer(model, config, device), config, device)
    if "compiled" in config.compile:
        if device.is_deterministic:
            torch.use_deterministic_algorithms(True)  # read by the compiler
        step.worker.image.compile()
        step.worker.text.compile()
    return step


@dataclass(frozen=True)
class Recording:
    """A graph with the memory it reads from and writes to."""

    replay: Callable[[], None]
    batch: Delivered
    metrics: DeviceMetrics


class GraphedStep(TrainStep):
    """A step that is recorded once for each shape of its inputs, in one pool of memory."""

    def __init__(
        self, model: CLIP, optimizer: torch.optim.Optimizer, config: TrainConfig, device: Device
    ) -> None:
        super().__init__(model, optimizer, config, device)
        self._steps_taken = 0
        self._recorder = device.graph_recorder()
        self._recordings: dict[tuple, Recording] = {}

    def __call__(
        self, batch: Batch | Sent, step: int, lr: float, watch: Stopwatch
    ) -> Callable[[], StepMetrics]:
        """Update the model. Does not measure phases, because a replay has none."""
        self._steps_taken += 1
        if self._steps_taken <= WARM_UP:
            plain_step = super().__call__
            return self._recorder.warm_up(lambda: plain_step(batch, step, lr, watch))
        watch.discard()
        with self.received(batch, step) as (inputs, delivered):
            key = inputs.side, Layout.of(delivered.tensors)
            if key not in self._recordings:
                self._recordings[key] = self._record(inputs, delivered)
            recording = self._recordings[key]
            recording.batch.fill(delivered)  # queued after the replay that reads the last batch
        self.set_learning_rate(lr)
        self.touched = True
        recording.replay()
        return self.reader(recording.metrics)

    def _record(self, inputs: Inputs, delivered: Delivered) -> Recording:
        """Record an update. Recording computes nothing, so the weights do not change."""
        batch = delivered.copy()
        self.optimizer.zero_grad(set_to_none=True)  # gradients belong into the graph's memory
        stopwatch = Stopwatch(self.device.synchronise, on=False)
        metric_names: list[str] = []

        def update() -> torch.Tensor:
            metrics = self.update(inputs.with_tensors(batch.tensors), stopwatch)
            metric_names[:] = metrics.names
            return metrics.values

        replay, values = self._recorder.record(update)
        return Recording(replay, batch, DeviceMetrics(metric_names, values))

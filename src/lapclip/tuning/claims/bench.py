"""What the claims are measured with: sizes, devices, and measurements that several claims share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import psutil

from lapclip.config import AUTO, ModelConfig
from lapclip.machine.choose_device import choose_device
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.measure.timing import Timer
from lapclip.model.shapes import SHAPES
from lapclip.tuning.claims.finding import CannotMeasure
from lapclip.tuning.model_size import count_parameters
from lapclip.tuning.rehearsal import Rehearsal, Workload, make_workload
from lapclip.tuning.step_memory import StepMemory, measure_step_memory
from lapclip.tuning.trial import Trial

BYTES_PER_PARAMETER = 40  # weights, gradients and Adam's averages, and as much for activations


def find_accelerator() -> Device | None:
    device, _ = choose_device(AUTO)
    return None if device.is_cpu else device


@dataclass
class Bench:
    """Sizes to measure at: those of the published run, unless a test makes them smaller."""

    shape: ModelConfig = SHAPES["seed"]
    larger_shape: ModelConfig = SHAPES["vit-b-32"]
    small_shape: ModelConfig = SHAPES["tiny"]
    """A model for what does not depend on the size."""
    batch: int = 12
    large_batch: int = 32
    batches: tuple[int, ...] = (8, 12, 16, 24)
    rounds: int = 2
    copy_bytes: int = 1 << 28
    product_size: int = 512
    cpu: Device = field(default_factory=Cpu)
    accelerator: Device | None = field(default_factory=find_accelerator)

    def require_accelerator(self) -> Device:
        """Return the accelerator. Nothing stands in for one that is not there."""
        if self.accelerator is None:
            raise CannotMeasure("torch finds no accelerator here")
        return self.accelerator

    def check_free_memory(self) -> None:
        """Refuse to train the published model in less memory than it needs."""
        needed = BYTES_PER_PARAMETER * count_parameters(self.shape)
        free = psutil.virtual_memory().available
        if needed > free:
            raise CannotMeasure(
                f"it takes about {needed / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free"
            )

    @cached_property
    def workload(self) -> Workload:
        """The published model at its batch, in float32 on the CPU."""
        return make_workload(self.shape, self.batch, self.cpu)

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The published model in training on the CPU."""
        self.check_free_memory()
        rehearsal = Rehearsal(self.workload, self.cpu, pairs=4 * self.batch)
        rehearsal.step_once()  # the first step sets things up
        return rehearsal

    @cached_property
    def memory(self) -> StepMemory:
        """The memory of a step of the published model on the CPU."""
        self.check_free_memory()
        return measure_step_memory(self.workload)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase of a step of the published model on the CPU."""
        return self.rehearsal.time_phases(self.rounds)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the published model on the CPU."""
        return sum(self.phases.values())

    def time_step(self, shape: ModelConfig, batch: int, device: Device) -> float:
        """Return the seconds of a step, sent to the device in the fastest known way."""
        rehearsal = Rehearsal(make_workload(shape, batch, device, compile=AUTO), device)
        trial = Trial(rehearsal.step, rehearsal.plan.batch(1), device)
        trial.warm_up()
        timer = Timer(device.synchronise, self.rounds + 1, warm_up_rounds=0)
        return timer.time_one(trial.step_once).median

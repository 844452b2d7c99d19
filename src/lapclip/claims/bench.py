"""What several claims are measured on, made once and only when needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import psutil
import torch

from lapclip.config import ModelConfig
from lapclip.errors import LapclipError
from lapclip.machine.choose_device import choose_device
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.microscope import device_speed
from lapclip.microscope.step_phases import BatchPhases, batch_phases, step_seconds
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.shapes import SHAPES
from lapclip.tuning.measure import Rehearsal, Workload, make_workload
from lapclip.tuning.memory_probe import StepMemory, step_memory


@dataclass
class Bench:
    """The sizes to measure at; those of the published run, unless a test makes them smaller."""

    shape: ModelConfig = SHAPES["seed"]
    larger: ModelConfig = SHAPES["vit-b-32"]
    small: ModelConfig = SHAPES["tiny"]
    """For losses over many steps."""
    batch: int = 12
    batches: tuple[int, ...] = (8, 12, 16, 24)
    turns: int = 2
    loss_steps: int = 50
    copy_bytes: int = 1 << 28
    product_size: int = device_speed.SIZE
    cpu: Device = field(default_factory=lambda: Cpu())
    accelerator: Device | None = field(default_factory=lambda: _accelerator())

    @cached_property
    def workload(self) -> Workload:
        """The published model at its batch, float32 on the CPU."""
        return make_workload(self.shape, self.batch, self.cpu)

    @cached_property
    def memory(self) -> StepMemory:
        self._check_room()
        return step_memory(self.workload, self.cpu)

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The published model in training on the CPU."""
        self._check_room()
        return Rehearsal(self.workload, self.cpu, pairs=4 * self.batch)

    @cached_property
    def phases(self) -> BatchPhases:
        return batch_phases(self.rehearsal, self.turns)

    def seconds(self, shape: ModelConfig, batch: int, device: Device) -> float:
        """A step of some model on some device, sent there in the fastest known way."""
        rehearsal = Rehearsal(make_workload(shape, batch, device, compile="auto"), device)
        return step_seconds(rehearsal.repeated(), device, self.turns + 1, warm_up=1 if device.is_cpu else 5)

    def _check_room(self) -> None:
        """Twelve bytes a parameter and the gradients, and about as much again for activations at this batch."""
        needed, free = 40 * parameters(self.shape), psutil.virtual_memory().available
        if needed > free:
            raise LapclipError(f"it takes about {needed / 1e9:.1f} GB of free memory; there are {free / 1e9:.1f} GB")


def parameters(shape: ModelConfig) -> int:
    """How many parameters a model has."""
    with torch.device("meta"):
        return count_parameters(CLIP(shape))


def _accelerator() -> Device | None:
    device, _ = choose_device("auto")
    return None if device.is_cpu else device

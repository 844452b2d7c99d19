"""Half precision against float32: how fast a step is, and where the loss goes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from lapclip.config import ModelConfig
from lapclip.errors import first_line
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.timing import in_turns
from lapclip.tuning.workload import Rehearsal, make_workload

SPIKE = 1.5
"""A loss this many times the median of the five before it is a spike."""


@dataclass(frozen=True)
class Precision:
    """One precision: median seconds of a step, and the loss of each of some steps from the same start."""

    seconds: float
    losses: tuple[float, ...]
    spikes: int
    error: str | None = None
    """Why it does not run here, if so; then nothing was measured."""

    @property
    def final_loss(self) -> float | None:
        """The mean over the last fifth, where it ran."""
        last = self.losses[-max(1, len(self.losses) // 5) :]
        return statistics.fmean(last) if last else None


def precisions(
    shape: ModelConfig,
    batch_size: int,
    device: Device,
    steps: int = 50,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    rounds: int = 5,
) -> dict[str, Precision]:
    """Each precision from the same weights on the same batches; then single steps timed in turns."""
    losses: dict[str, tuple[float, ...]] = {}
    ready, faults = {}, {}
    for dtype in dtypes:
        try:
            rehearsal = Rehearsal(make_workload(shape, batch_size, device, dtype), device, pairs=2 * batch_size)
            losses[dtype] = tuple(rehearsal().loss for _ in range(steps))
            ready[dtype] = rehearsal.repeated()
        except (RuntimeError, NotImplementedError) as error:  # torch's own: this device has not got it
            faults[dtype] = first_line(error)
    seconds = in_turns(ready, device.synchronise, rounds)
    measured = {name: Precision(seconds[name], losses[name], spikes(losses[name])) for name in ready}
    return measured | {name: Precision(0.0, (), 0, error) for name, error in faults.items()}


def spikes(losses: tuple[float, ...], window: int = 5) -> int:
    """How often the loss jumps above what it was shortly before, or is no number."""
    return sum(
        not losses[at] <= SPIKE * statistics.median(losses[at - window : at]) for at in range(window, len(losses))
    )

"""What a step takes with a tower on each of two devices, predicted from the time of each tower alone on its own.

    predicted = transfer + exchange + slowdown * (max(forward) + max(backward) + max(update))

Both towers compute at once, so of the two times only the larger counts, in each of three stretches: between them
everything waits for both, first for the loss, then for the length of all gradients. The exchange is what crosses over,
and the loss. Two towers at once slow each other down, because they share Python's lock and the processor's cores: by
how much is seen in the forward pass, and taken to be the same in the other two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapclip.data.batches import Batch
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.training.cuda_graph import WARM_UP
from lapclip.training.inputs import Inputs
from lapclip.training.two_devices import TOWERS, AnyHalf, SplitStep

ROUNDS = 5
STRETCHES = ("forward", "backward", "update")
"""What towers do at once, each waiting for the other at its end."""


@dataclass(frozen=True)
class TowerSeconds:
    """What a tower takes alone on its device."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Predicted:
    """A step by its parts, in seconds."""

    towers: dict[str, TowerSeconds]
    transfer: float
    """Of the batch to where its parts are seen."""
    exchange: float
    """Of embeddings and their gradients, with the loss in between."""
    forward_at_once: float
    """Of both towers, forward."""

    @property
    def slowdown(self) -> float:
        """How many times as long the slower tower takes while the other one computes too."""
        return max(1.0, self.forward_at_once / self._slower("forward"))

    @property
    def seconds(self) -> float:
        return self.transfer + self.exchange + self.slowdown * sum(map(self._slower, STRETCHES))

    def _slower(self, stretch: str) -> float:
        return max(getattr(tower, stretch) for tower in self.towers.values())

    @property
    def waits(self) -> str:
        """The tower that waits for the other."""
        return min(self.towers, key=lambda tower: self.towers[tower].total)

    def text(self, pair: Device) -> str:
        """For people."""
        alone = ", ".join(
            f"{name} {own.total * 1e3:.1f} ms on {pair.of(name).kind}"
            for name, own in self.towers.items()
        )
        return f"predicted {self.seconds * 1e3:.1f} ms a step ({alone}, exchange {self.exchange * 1e3:.1f} ms)"


def predict_step(step: SplitStep, batch: Batch, rounds: int = ROUNDS) -> Predicted:
    """Time each tower alone, and what is between them. The weights stay as they are, the optimiser's averages do
    not."""
    warm_up(step, batch)
    return predicted_from([time_parts(step, batch) for _ in range(rounds)])


def warm_up(step: SplitStep, batch: Batch) -> None:
    """Libraries set themselves up, and what can be recorded is."""
    off = Stopwatch(step.device.synchronise, on=False)
    for _ in range(WARM_UP + 2):
        step(batch, 1, 0.0, off)()


def predicted_from(taken: Sequence[dict[str, float]]) -> Predicted:
    """The prediction that follows from the medians of what was timed."""
    median = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    towers = {
        tower: TowerSeconds(*(median[f"{tower} {name}"] for name in STRETCHES)) for tower in TOWERS
    }
    return Predicted(towers, median["transfer"], median["exchange"], median["forward at once"])


def time_parts(step: SplitStep, batch: Batch) -> dict[str, float]:
    """Seconds of every part, one after the other, each from a device at rest to a device at rest again."""
    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        step.device.synchronise()
        began = time.perf_counter()
        result = run()
        step.device.synchronise()
        found[name] = time.perf_counter() - began
        return result

    inputs: Inputs = timed("transfer", lambda: step.inputs(batch, 1).on(step.device))
    step.set_learning_rate(0.0)

    def alone(tower: str, name: str, work: Callable[[AnyHalf], Any]) -> Any:
        return timed(f"{tower} {name}", lambda: step.alone(tower, work))

    for tower in TOWERS:
        alone(tower, "forward", lambda half: half.forward(inputs))
    embeddings = timed(
        "forward at once",
        lambda: step.forward(inputs, Stopwatch(step.device.synchronise, on=False)),
    )
    _, gradients = timed("exchange", lambda: step.judge(inputs, embeddings))
    for tower in TOWERS:
        alone(tower, "backward", lambda half: half.backward(inputs, gradients[half.tower]))
    for tower in TOWERS:
        device = step.device.of(tower).torch
        divisor = (
            torch.ones((), device=device)
            if step.config.clip_norm or step.loss_scale is not None
            else None
        )
        overflowed = (
            None if step.loss_scale is None else torch.zeros((), dtype=torch.bool, device=device)
        )
        alone(tower, "update", lambda half, d=divisor, o=overflowed: half.update(d, o))
    return found

"""Is it worth it? What several ranks will make of a run, from what their machines and their link can do.

Each rank times the towers on one shard; the link is timed with the exchanges that a step makes; and a formula puts them
together. Shards are dealt by the speeds that were measured, before the run, and never again: so a rank that is slow for
a moment does not change who computes what.
"""

from __future__ import annotations

import copy
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import Device
from lapclip.machine.facts import logical_cores
from lapclip.machine.ranks import Ranks
from lapclip.text import counted, milliseconds
from lapclip.training.optimizer import make_optimizer
from lapclip.training.recovery import MEMORY, cause_of
from lapclip.training.sharded_update import exchanged_numbers
from lapclip.training.shards import GradientSum
from lapclip.training.step import TrainStep

PINGS = 20
"""Messages that the latency is the median of."""
FIRST_NUMBERS, MOST_NUMBERS = 1 << 16, 1 << 23
"""Of how many the bandwidth is measured with: more and more, until it takes long enough."""
LONG_ENOUGH = 0.3
"""Seconds that the last of these exchanges takes."""
ROUNDS, LONG = 7, 1.0
"""How often each thing is timed, of which the median counts; and the seconds after which it is not timed again."""
BUSY = 0.5
"""Share of an exchange in which a core is at work, from which on the link is not what takes the time."""
BACKWARD = 2 / 3
"""Share of a pass through the towers and back that is the way back."""
UNEQUAL = 1.1
"""How many times as fast unequal shares have to make a step: timings of equal machines differ too."""
WORTH_IT = 1.03
"""How many times as fast as alone a run has to be to be worth a second machine."""


@dataclass(frozen=True)
class Link:
    """The network between ranks, as an exchange of gradients finds it."""

    latency: float
    """Seconds from one rank to another and back."""
    bytes_per_second: float
    """Of gradients that all ranks add up."""
    cpu_share: float
    """Share of that time in which a core is at work, and so cannot compute."""

    def overlaps(self, threads: int, device: Device) -> bool:
        """Whether gradients are to travel while others are computed. A CPU that has no core left for it computes more
        slowly meanwhile, and all its threads wait for the one that is disturbed: then only a slow link is worth it."""
        return not device.is_cpu or threads < logical_cores() or self.cpu_share < BUSY


@dataclass(frozen=True)
class Worth:
    """What a run together is made of, and how long its steps will take. Seconds."""

    hosts: list[str]
    shard_seconds: list[float]
    """Each rank's time for one shard, through the towers and back."""
    shards: list[int]
    """How many each rank computes of every batch."""
    batch_seconds: float
    """The writer's time for the batch as a whole, as it would be computed alone."""
    optimizer_seconds: float
    gradient_bytes: int
    """In float32."""
    exchange: str
    """The precision in which they travel."""
    embedding_bytes: int
    latency: float
    bytes_per_second: float
    cpu_share: float
    overlaps: bool = True
    """Whether gradients travel while others are still computed."""
    predicted_step_seconds: float = 0.0
    alone_step_seconds: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def speed_up(self) -> float:
        """How many times as fast as one machine alone."""
        return self.alone_step_seconds / self.predicted_step_seconds

    def exchange_seconds(self, halved: bool = False) -> float:
        """Seconds that gradients take when nothing else is done."""
        halved = halved or self.exchange != "float32"
        return self.gradient_bytes / (1 + halved) / self.bytes_per_second + 2 * self.latency

    def step_seconds(self, halved: bool = False, batch: float = 1.0) -> float:
        """A step together; `batch` is how many times as large the batch is. Gradients travel while the last shard is
        carried back, but for the work that this takes of the same cores, or after it."""
        computed = (
            max(each * n for each, n in zip(self.shard_seconds, self.shards, strict=True)) * batch
        )
        last = (
            BACKWARD
            * max(each for each, n in zip(self.shard_seconds, self.shards, strict=True) if n)
            * batch
        )
        exchanged = self.exchange_seconds(halved)
        work = exchanged * self.cpu_share if self.overlaps else exchanged
        embedded = self.embedding_bytes * batch / self.bytes_per_second + 2 * self.latency
        return (
            computed + work + max(0.0, exchanged - work - last) + embedded + self.optimizer_seconds
        )

    def pays_from(self) -> float | None:
        """How many times as large a batch has to be for it to be worth a second machine; None if none is."""
        for times in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64):
            alone = self.batch_seconds * times + self.optimizer_seconds
            if alone > WORTH_IT * self.step_seconds(batch=times):
                return times
        return None

    def advice(self, batch_size: int) -> str:
        """What to do, in a sentence."""
        halved = self.alone_step_seconds / self.step_seconds(halved=True)
        if max(self.speed_up, halved) < WORTH_IT:
            pays = self.pays_from()
            more = f"; it would pay from a batch of {round(batch_size * pays):,} on" if pays else ""
            return f"alone is faster{more}"
        if halved > WORTH_IT * self.speed_up:
            return f"with gradients in half precision it would be {halved:.2f}x: --set train.exchange=bfloat16"
        return "worth it"

    def line(self, batch_size: int) -> str:
        """What a user wants to know before the run."""
        return (
            f"{counted(len(self.hosts), 'rank')}: {milliseconds(self.predicted_step_seconds * 1e3)} a step predicted, "
            f"{milliseconds(self.alone_step_seconds * 1e3)} alone: {self.speed_up:.2f}x; "
            f"link {self.latency * 1e3:.2f} ms and "
            f"{self.bytes_per_second * 8 / 1e9:.2f} Gbit/s of gradients; shards {' + '.join(map(str, self.shards))}; "
            f"{self.advice(batch_size)}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speed_up": self.speed_up}


def deal_by_speed(seconds: list[float], shards: int) -> list[int]:
    """How many shards each rank computes, so that the last is done as early as can be: one by one to whoever would be
    done with it first. Equally, where that gains too little to be sure of."""
    count = len(seconds)
    equal = [(rank + 1) * shards // count - rank * shards // count for rank in range(count)]
    dealt = [0] * count
    for _ in range(shards):
        done = [each * (n + 1) for each, n in zip(seconds, dealt, strict=True)]
        dealt[done.index(min(done))] += 1
    by_speed, by_number = (max(map(operator.mul, seconds, each)) for each in (dealt, equal))
    return dealt if by_speed * UNEQUAL < by_number else equal


def measure_together(
    step: TrainStep, batch: Batch, train: TrainConfig, device: Device, ranks: Ranks
) -> Worth:
    """Time machines and link, deal the shards, and predict. All ranks do this together, and find the same."""
    shards = train.shards or ranks.count
    pairs = len(batch.tokens_BL)
    own = ranks.all_or_none(lambda: _pass_seconds(step, batch, -(-pairs // shards), train, device))
    whole = optimizer = 0.0
    if ranks.writes:
        whole = _if_it_fits(lambda: _pass_seconds(step, batch, pairs, train, device), own * shards)
        optimizer = _if_it_fits(lambda: _optimizer_seconds(step, train, device), 0.0)
    shard_seconds = ranks.gathered(
        torch.tensor([own], dtype=torch.float64), [1] * ranks.count, "speed"
    ).tolist()
    link = measure_link(ranks, device)
    dealt = deal_by_speed(shard_seconds, shards) if train.shards else [1] * ranks.count
    numbers = exchanged_numbers(step, batch)
    found = Worth(
        hosts=list(ranks.hosts),
        shard_seconds=shard_seconds,
        shards=dealt,
        batch_seconds=whole,
        optimizer_seconds=optimizer,
        gradient_bytes=numbers * 4,
        exchange=train.exchange,
        embedding_bytes=pairs * 2 * step.model.shape.embedding * 4,
        latency=link.latency,
        bytes_per_second=link.bytes_per_second,
        cpu_share=link.cpu_share,
        overlaps=link.overlaps(int(train.threads), device),
    )
    found = Worth(**ranks.from_writer(asdict(found), "prediction"))
    speeds = ", ".join(milliseconds(each * 1e3) for each in found.shard_seconds)
    equal = max(found.shards) - min(found.shards) <= 1
    reason = f"{'equally' if equal else 'by speed'}: a shard takes the ranks {speeds}"
    cores = f"the link keeps a core busy for {found.cpu_share:.0%} of an exchange"
    travels = (
        "while others are computed"
        if found.overlaps
        else "when all are there, because no core is left for it"
    )
    return Worth(
        **asdict(found)
        | {
            "predicted_step_seconds": found.step_seconds(),
            "alone_step_seconds": found.batch_seconds + found.optimizer_seconds,
            "reasons": {"shards": reason, "overlaps": f"gradients travel {travels}; {cores}"},
        }
    )


def measure_link(ranks: Ranks, device: Device) -> Link:
    """Time the exchanges that a step makes, with nothing else to do."""
    one = torch.zeros(1)
    pings = []
    for _ in range(PINGS):
        began = time.perf_counter()
        ranks.gathered(one, [1] * ranks.count, "answer")
        pings.append(time.perf_counter() - began)
    latency = statistics.median(pings)
    numbers = FIRST_NUMBERS
    while True:
        seconds, work = _exchange(ranks, device, numbers)
        if ranks.from_writer(seconds >= LONG_ENOUGH or numbers >= MOST_NUMBERS, "speed"):
            break
        numbers *= 4
    seconds, work = min((seconds, work), _exchange(ranks, device, numbers))
    return Link(latency, numbers * 4 / max(seconds - 2 * latency, 1e-9), min(1.0, work / seconds))


def _exchange(ranks: Ranks, device: Device, numbers: int) -> tuple[float, float]:
    """Seconds in which all ranks add up so many numbers, and those of a core at work."""
    gradient = torch.zeros(numbers, device=device.torch)
    ranks.gathered(torch.zeros(1), [1] * ranks.count, "answer")  # all begin at once
    began, worked = time.perf_counter(), time.process_time()
    summing = GradientSum([gradient], ranks.count, ranks)
    summing.add_group(0, [gradient])
    summing.total()
    device.synchronise()
    return time.perf_counter() - began, time.process_time() - worked


def _pass_seconds(
    step: TrainStep, batch: Batch, pairs: int, train: TrainConfig, device: Device
) -> float:
    """Seconds that some pairs take through the towers and back, in micro-batches where the run has them."""
    images = batch.pixels_BSSC if batch.image_features is None else batch.image_features
    at_once = min(
        pairs, train.micro_batch or pairs, len(images)
    )  # a rank may have those of its own shards alone
    seconds = _timed(lambda: step.rehearse(batch, at_once), device) * pairs / at_once
    again = 0 < train.micro_batch < len(batch.tokens_BL)  # gradient caching goes forward twice
    return seconds * (2 - BACKWARD if again else 1)


def _if_it_fits(task: Callable[[], float], otherwise: float) -> float:
    """What is only timed to compare with is left out where there is no memory for it."""
    try:
        return task()
    except Exception as error:
        if cause_of(error) != MEMORY:
            raise
    return otherwise


def _timed(task: Callable[[], object], device: Device) -> float:
    seconds: list[float] = []
    while len(seconds) <= ROUNDS and sum(seconds) < LONG:
        began = time.perf_counter()
        task()
        device.synchronise()
        seconds.append(time.perf_counter() - began)
    return statistics.median(
        seconds[1:] or seconds
    )  # the first is slower, which shows where it is short


def _optimizer_seconds(step: TrainStep, train: TrainConfig, device: Device) -> float:
    """What an update of all weights takes, seen on a copy of the model."""
    model = copy.deepcopy(step.model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return _timed(make_optimizer(model, train, device).step, device)

"""Real training steps: where their time goes, what the cores do meanwhile, how threads and precisions change it; and
what prepares their batches: our thread, the training itself, or worker processes, which lapclip uses nowhere else."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lapclip.config import ModelConfig
from lapclip.data.batches import Batch, BatchPlan, prefetch
from lapclip.errors import first_line
from lapclip.machine.choose_device import default_threads
from lapclip.machine.device import Device
from lapclip.machine.timing import PHASES, Stopwatch
from lapclip.measure.timing import Timer
from lapclip.training.feed import feed
from lapclip.tuning.measure import Rehearsal, make_workload


@dataclass(frozen=True)
class BatchPhases:
    """Median seconds of each phase of a batch; `load` is what the step had to wait for."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        return {name: spent / self.total for name, spent in self.seconds.items()}


@dataclass(frozen=True)
class CoreUse:
    """The share of the time that each core was busy while steps were taken, by anything on the machine."""

    cores: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class ThreadTimes:
    """Median seconds of a step by the number of threads."""

    seconds: dict[int, float]
    performance_cores: int

    @property
    def best(self) -> int:
        return min(self.seconds, key=self.seconds.__getitem__)


def batch_phases(rehearsal: Rehearsal, turns: int = 5, warm_up: int = 1) -> BatchPhases:
    """Steps with batches prepared ahead, as training takes them."""
    taken: list[dict[str, float]] = []
    with feed(rehearsal.plan, rehearsal.step, 1, warm_up + turns) as batches:
        for turn in range(warm_up + turns):
            watch = Stopwatch(rehearsal.device.synchronise, on=True)
            with watch.phase("load"):
                batch = next(batches)
            rehearsal.watched(watch, batch)
            if turn >= warm_up and watch.seconds is not None:
                taken.append(watch.seconds)
    return BatchPhases(
        {name: statistics.median(seconds[name] for seconds in taken) for name in PHASES}
    )


def core_use(rehearsal: Rehearsal, seconds: float = 2.0) -> CoreUse:
    """What each core does while steps are taken for so long; one step at least."""
    step = rehearsal.repeated()
    step()
    psutil.cpu_percent(percpu=True)  # counts from the last call
    began = time.perf_counter()
    while True:
        step()
        if (spent := time.perf_counter() - began) >= seconds:
            break
    return CoreUse(tuple(share / 100 for share in psutil.cpu_percent(percpu=True)), spent)


def thread_counts(cores: int, performance: int) -> list[int]:
    """1, then doubled, up to the performance cores, then all: what is worth trying, the likely ones first."""
    doubled = [1 << power for power in range(cores.bit_length()) if 1 << power <= performance]
    return list(dict.fromkeys([performance, *reversed(doubled), cores]))


def thread_times(
    rehearsal: Rehearsal, counts: list[int] | None = None, rounds: int = 3
) -> ThreadTimes:
    """The same step with each number of threads, in turns. Leaves the number as it was."""
    before, performance = torch.get_num_threads(), default_threads()
    counts = counts or thread_counts(os.cpu_count() or 1, performance)
    step = rehearsal.repeated()
    times: dict[int, list[float]] = {count: [] for count in counts}
    try:
        step()
        for turn in range(1 + rounds):  # the first with each number starts its threads
            for count in counts:
                torch.set_num_threads(count)
                spent = Timer(rehearsal.device.synchronise).time_once(step)
                if turn:
                    times[count].append(spent)
    finally:
        torch.set_num_threads(before)
    return ThreadTimes(
        {count: statistics.median(spent) for count, spent in sorted(times.items())}, performance
    )


def step_seconds(
    step: Callable[[], object], device: Device, turns: int = 3, warm_up: int = 1
) -> float:
    """Median seconds of a step after so many that warm up, compile and record."""
    for _ in range(warm_up):
        step()
    return statistics.median(Timer(device.synchronise).time_once(step) for _ in range(turns))


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
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
    rounds: int = 5,
) -> dict[str, Precision]:
    """Each precision from the same weights on the same batches; then single steps timed in turns."""
    losses: dict[str, tuple[float, ...]] = {}
    ready, faults = {}, {}
    for dtype in dtypes:
        try:
            rehearsal = Rehearsal(
                make_workload(shape, batch_size, device, dtype), device, pairs=2 * batch_size
            )
            losses[dtype] = tuple(rehearsal().loss for _ in range(steps))
            ready[dtype] = rehearsal.repeated()
        except (
            RuntimeError,
            NotImplementedError,
        ) as error:  # torch's own: this device has not got it
            faults[dtype] = first_line(error)
    timings = Timer(device.synchronise, rounds).time_in_turns(ready)
    seconds = {name: timing.median for name, timing in timings.items()}
    measured = {
        name: Precision(seconds[name], losses[name], spikes(losses[name])) for name in ready
    }
    return measured | {name: Precision(0.0, (), 0, error) for name, error in faults.items()}


def spikes(losses: tuple[float, ...], window: int = 5) -> int:
    """How often the loss jumps above what it was shortly before, or is no number."""
    return sum(
        not losses[at] <= SPIKE * statistics.median(losses[at - window : at])
        for at in range(window, len(losses))
    )


WORKERS, AHEAD = 4, 2
"""The published settings: persistent workers, and batches prefetched by each."""


@dataclass(frozen=True)
class LoaderTimes:
    """One way to load."""

    seconds: float
    """Median seconds from one update to the next."""
    start_seconds: float
    """Until the first batch was there."""


class Batches(Dataset):
    """The batches of a plan, one an index."""

    def __init__(self, plan: BatchPlan, count: int) -> None:
        self.plan, self.count = plan, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        arrays = vars(self.plan.batch(index + 1))
        return {
            name: torch.from_numpy(array)
            for name, array in arrays.items()
            if isinstance(array, np.ndarray)
        }


def loader_times(
    rehearsal: Rehearsal,
    steps: int = 4,
    workers: tuple[int, ...] = (0, WORKERS),
    rounds: int = 2,
    own: bool = True,
) -> dict[str, LoaderTimes]:
    """Training with each way to load, in turns: `thread` is our own, the others are torch's DataLoader."""
    ways: dict[str, Callable[[], Iterator[Batch]]] = {}
    loaders: list[DataLoader] = []  # their workers live as long as they do
    if own:
        ways["thread"] = lambda: prefetch(rehearsal.plan, 1, steps + 1)
    for count in workers:
        for pinned in (False, True) if rehearsal.device.pins_memory else (False,):
            loader = _loader(rehearsal.plan, steps + 1, count, pinned)
            loaders.append(loader)
            name = ("in line" if count == 0 else f"{count} workers") + (
                ", pinned" if pinned else ""
            )
            ways[name] = lambda loader=loader: _as_batches(loader)
    rehearsal()
    times: dict[str, list[float]] = {name: [] for name in ways}
    starts: dict[str, float] = {}
    for _ in range(rounds):
        for name, make in ways.items():
            began = time.perf_counter()
            batches = make()
            first = next(batches)
            starts.setdefault(
                name, time.perf_counter() - began
            )  # in later rounds persistent workers are there
            rehearsal(first)
            for _ in range(steps):
                began = time.perf_counter()
                rehearsal(next(batches))
                times[name].append(time.perf_counter() - began)
            for _ in batches:
                pass
    return {
        name: LoaderTimes(statistics.median(spent), starts[name]) for name, spent in times.items()
    }


def _loader(plan: BatchPlan, count: int, workers: int, pinned: bool) -> DataLoader:
    more = {"persistent_workers": True, "prefetch_factor": AHEAD} if workers else {}
    with warnings.catch_warnings():  # more workers than cores is what the claim asks for
        warnings.simplefilter("ignore", UserWarning)
        return DataLoader(
            Batches(plan, count), batch_size=None, num_workers=workers, pin_memory=pinned, **more
        )


def _as_batches(loader: Iterable[dict[str, Tensor]]) -> Iterator[Batch]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        batches = iter(loader)
    for tensors in batches:
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        yield Batch(**arrays)

"""What prepares the batches: our thread, the training itself, or worker processes, which lapclip uses nowhere else."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lapclip.data.batches import Batch, BatchPlan, prefetch
from lapclip.tuning.measure import Rehearsal

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
        return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


def loader_times(
    rehearsal: Rehearsal, steps: int = 4, workers: tuple[int, ...] = (0, WORKERS), rounds: int = 2, own: bool = True
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
            name = ("in line" if count == 0 else f"{count} workers") + (", pinned" if pinned else "")
            ways[name] = lambda loader=loader: _as_batches(loader)
    rehearsal()
    times: dict[str, list[float]] = {name: [] for name in ways}
    starts: dict[str, float] = {}
    for _ in range(rounds):
        for name, make in ways.items():
            began = time.perf_counter()
            batches = make()
            first = next(batches)
            starts.setdefault(name, time.perf_counter() - began)  # in later rounds persistent workers are there
            rehearsal(first)
            for _ in range(steps):
                began = time.perf_counter()
                rehearsal(next(batches))
                times[name].append(time.perf_counter() - began)
            for _ in batches:
                pass
    return {name: LoaderTimes(statistics.median(spent), starts[name]) for name, spent in times.items()}


def _loader(plan: BatchPlan, count: int, workers: int, pinned: bool) -> DataLoader:
    more = {"persistent_workers": True, "prefetch_factor": AHEAD} if workers else {}
    with warnings.catch_warnings():  # more workers than cores is what the claim asks for
        warnings.simplefilter("ignore", UserWarning)
        return DataLoader(Batches(plan, count), batch_size=None, num_workers=workers, pin_memory=pinned, **more)


def _as_batches(loader: Iterable[dict[str, Tensor]]) -> Iterator[Batch]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        batches = iter(loader)
    for tensors in batches:
        yield Batch(**{name: tensor.numpy() for name, tensor in tensors.items()})

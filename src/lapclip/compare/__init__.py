"""The CPU against every accelerator here: whole training steps over sizes of model and batch.

With one device only, its precisions and numbers of threads are compared instead.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from lapclip import __version__
from lapclip.compare.fits import (
    BATCHES,
    CAPTION_TOKENS,
    MEASURED,
    Cell,
    Contestant,
    Rung,
    crossover,
    fit,
    fitted,
    predictions,
    recommendations,
)
from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine import facts
from lapclip.machine.choose_device import (
    available,
    default_threads,
    device_of,
    prepare_device,
)
from lapclip.machine.device import Device
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.machine.sensors import Energy, of_device
from lapclip.machine.timing import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.model.clip import CLIP
from lapclip.progress import Status
from lapclip.text import short_duration
from lapclip.training.cuda_graph import WARM_UP, AnyStep, make_step
from lapclip.training.feed import ready
from lapclip.training.memory import SHARE_OF_MEMORY, predict_bytes
from lapclip.tuning.choose_kernels import choose_kernels

FORMAT = 1  # of the JSON object
QUICK_SECONDS, SECONDS = 70.0, 600.0
SHARE_OF_BUDGET = 30
"""A single cell may take one part in so many of the budget."""
TYPICAL = Rung(384, 8), 16
"""The size and batch at which a contestant's kernels are chosen, once for all cells."""
LONG = 0.5
"""Seconds of a step from which on all threads are sure to be of use, if its neighbour used them all.

Also the seconds that the slowest counters of energy need, which are read ten times a second.
"""
MOST_OF_EACH, CELLS = 1.0, 500
"""A cell is timed for one part in so many of the budget, and at most so many seconds."""


def contestants() -> list[Contestant]:
    """CPU and accelerators in float32 and half precision, and both together; a CPU alone also with fewer threads."""
    threads, here = default_threads(), available()
    if len(here) == 1:
        alone = here[0]
        fewer = [Contestant(alone.kind, "float32", threads // 2)] if threads > 1 else []
        return [
            Contestant(alone.kind, "float32", threads),
            Contestant(alone.kind, alone.half, threads),
            *fewer,
        ]
    # Against an accelerator the CPU is to do its best: at small sizes, fewer threads are faster.
    return [
        Contestant(device.kind, dtype, 0 if device.is_cpu else threads)
        for device in here
        for dtype in ("float32", device.half)
    ]


def compare(
    seconds: float,
    status: Status,
    rungs: Sequence[Rung] = MEASURED,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Every cell that fits into memory and time, and what follows from all of them."""
    warnings = [warning] if (warning := describe_busy_cores()) else []
    cells = measure_cells(contestants(), rungs, batches, seconds, status)
    fits = fit(cells)
    cells = fitted(cells, fits)
    return {
        "format": FORMAT,
        "machine": facts.machine_facts(),
        "devices": {device.kind: device.label for device in available()},
        "torch": str(torch.__version__),
        "lapclip": __version__,
        "warnings": warnings,
        "cells": [asdict(cell) for cell in cells],
        "fits": [asdict(one) for one in fits],
        "crossover": crossover(cells),
        "predictions": predictions(fits),
        "recommendations": recommendations(cells),
    }


def measure_cells(
    among: Sequence[Contestant],
    rungs: Sequence[Rung],
    batches: Sequence[int],
    seconds: float,
    status: Status,
) -> list[Cell]:
    """Contestants in turns, small models first; what would take too long is left to the fit.

    Every other batch of all sizes comes first, so that a short comparison also reaches from small to large.
    """
    ends = time.perf_counter() + seconds
    of_each = min(MOST_OF_EACH, seconds / CELLS)
    cells: list[Cell] = []
    trains = {contestant: contestant_settings(contestant, status) for contestant in among}
    sizes = [
        (rung, batch) for some in (batches[::2], batches[1::2]) for rung in rungs for batch in some
    ]
    for rung, batch in sizes:
        for contestant in among:
            cell = Cell(**asdict(contestant), model=rung.shape.name, parameters=rung.parameters,
                        work=rung.work(batch), batch=batch, layers=rung.layers)  # fmt: skip
            left = short_duration(max(0.0, ends - time.perf_counter()))
            what = f"{rung.parameters / 1e6:.3g} M parameters, batch {batch}, {contestant.text()}"
            status(
                f"{what}; cell {len(cells) + 1} of {len(sizes) * len(among)}, at most {left} left for them"
            )
            train = replace(trains[contestant], batch_size=batch)
            if reason := _too_large(cell, rung, train):
                cells.append(replace(cell, skipped=reason, too_large=True))
            elif reason := _too_long(cell, cells, seconds, ends):
                cells.append(replace(cell, skipped=reason))
            else:
                cells.append(measure_cell(cell, rung, train, cells, of_each, ends))
    _model.cache_clear()
    return sorted(
        cells, key=lambda cell: (cell.parameters, among.index(cell.contestant), cell.batch)
    )


def _too_large(cell: Cell, rung: Rung, train: TrainConfig) -> str | None:
    """Return why a cell does not fit into memory, or None if it does."""
    device = device_of(cell.device)
    free = device.free_bytes()
    needed = predict_bytes(rung.shape, train, CAPTION_TOKENS).total
    if device.shares_memory:
        needed += 4 * rung.parameters  # the weights that all contestants begin with
    if needed > SHARE_OF_MEMORY * free:
        return f"predicted {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
    return None


def _too_long(cell: Cell, cells: Sequence[Cell], seconds: float, ends: float) -> str | None:
    """Why there is no time for a cell, if so."""
    left = ends - time.perf_counter()
    if left < 0:
        return "no time was left"
    step = _expected(cell, cells)
    if 3 * step > min(seconds / SHARE_OF_BUDGET, left):
        return f"about {step:.2g} s a step is too long for this comparison"
    return None


def _expected(cell: Cell, cells: Sequence[Cell]) -> float:
    """Seconds of a step, as the contestant's other cells suggest: by its work, and by its weights to be updated."""
    own = [other for other in cells if other.contestant == cell.contestant and other.ms]
    if not own:
        return 0.0
    alike = _nearest(cell, own) or own[0]
    lightest = min(own, key=lambda other: (-other.parameters, other.work))
    by_work = (alike.ms or 0.0) * max(1.0, cell.work / alike.work)
    by_weights = (
        (lightest.ms or 0.0) * cell.parameters / lightest.parameters
        if cell.work > lightest.work
        else 0.0
    )
    return max(by_work, by_weights) / 1e3


def _nearest(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The contestant's own cell whose work is the most alike."""
    own = [other for other in cells if other.contestant == cell.contestant and other.ms]
    return min(own, key=lambda other: abs(np.log(other.work / cell.work)), default=None)


def measure_cell(
    cell: Cell,
    rung: Rung,
    train: TrainConfig,
    cells: Sequence[Cell],
    seconds: float,
    ends: float = math.inf,
) -> Cell:
    """A cell with what was measured in so many seconds of steps; past the end no other number of threads is tried."""
    device, weights = device_of(cell.device), _model(rung)
    try:
        with device.watch_peak() as peak:
            step = make_step(copy.deepcopy(weights).to(device.torch), train, device)
            take = functools.partial(
                _time_steps, step, random_batch(rung.shape, cell.batch), device, seconds
            )
            if cell.threads:
                threads, (spent, joules) = cell.threads, take(cell.threads)
            else:
                nearest = _nearest(cell, cells)
                most = default_threads()
                start = nearest.used_threads if nearest else max(1, most // 4)
                threads, (spent, joules) = _best_threads(take, start or most, most, ends)
    except (
        Exception
    ) as error:  # its kind alone: the result may be given to others, and messages may hold paths
        return replace(cell, skipped=f"does not run here ({type(error).__name__})")
    pairs = cell.batch / spent
    return replace(cell, ms=spent * 1e3, pairs_per_second=pairs, peak_memory_bytes=peak.added, joules=joules,
                   used_threads=threads)  # fmt: skip


@functools.lru_cache(maxsize=1)
def _model(rung: Rung) -> CLIP:
    """Drawing a large model's weights takes longer than its steps, and all contestants may have the same."""
    return CLIP(rung.shape)


Taken = tuple[float, float | None]
"""Seconds of a step, and its joules where the machine counts them."""


def _best_threads(
    take: Callable[[int], Taken], start: int, most: int, ends: float = math.inf
) -> tuple[int, Taken]:
    """Twice as many threads as long as that is faster; if it is not, half as many. A long step has too much to do."""
    taken = {start: take(start)}
    if taken[start][0] > LONG and start == most:
        return start, taken[start]
    best = start
    for scaled in (lambda threads: min(2 * threads, most), lambda threads: max(1, threads // 2)):
        while (other := scaled(best)) not in taken and time.perf_counter() < ends:
            taken[other] = take(other)
            if taken[other][0] < taken[best][0]:
                best = other
    return best, taken[best]


def _time_steps(step: AnyStep, batch: Batch, device: Device, seconds: float, threads: int) -> Taken:
    """The median seconds of a step, after those that set things up; so many seconds of steps, two at least."""
    prepare_device(device, threads)
    off, handed_over = Stopwatch(device.synchronise, on=False), ready(step, batch, 1)
    timer = Timer(device.synchronise)
    take = functools.partial(timer.time_once, lambda: step(handed_over, 1, 0.0, off)())
    for _ in range(1 if device.is_cpu else WARM_UP + 2):
        take()
    times: list[float] = []
    energy = Energy()
    while len(times) < 2 or sum(times) < seconds:
        times.append(take())
    joules = of_device(energy.joules(), device.kind) if sum(times) > LONG else None
    joules = None if energy.at_least else joules  # known to be less than was used
    return statistics.median(times), None if joules is None else joules / len(times)


def contestant_settings(contestant: Contestant, status: Status) -> TrainConfig:
    """As `lapclip train` would have them, with the kernels that suit a typical size."""
    status(f"kernels, {contestant.text()}")
    device = device_of(contestant.device)
    prepare_device(device, contestant.threads or default_threads())
    rung, batch = TYPICAL
    how = "graph" if device.records_graphs else "none"
    train = TrainConfig(
        batch_size=batch, device=device.kind, dtype=contestant.dtype, compile=how, steps=1
    )
    forms, _ = choose_kernels(rung.shape, train, CAPTION_TOKENS, device)
    return replace(train, **forms)


def random_batch(shape: ModelConfig, batch: int) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, shape.vocabulary - 2, (batch, CAPTION_TOKENS))
    tokens[:, -1] = shape.vocabulary - 1
    pixels = draw.integers(0, 256, (batch, shape.image_size, shape.image_size, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(batch, dtype=bool), np.zeros(batch, dtype=bool))

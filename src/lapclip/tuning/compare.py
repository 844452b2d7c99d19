"""Compare the CPU with the accelerator: whole training steps over sizes of model and batch.

With the CPU alone, its precisions and numbers of threads are compared instead.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from lapclip import __version__
from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine import facts
from lapclip.machine.choose_device import available, default_threads, device_of, prepare_device
from lapclip.machine.device import Device
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.machine.sensors import Energy, of_device
from lapclip.measure.phases import Stopwatch
from lapclip.measure.timing import Clock, Timer
from lapclip.model.clip import CLIP
from lapclip.progress import Status
from lapclip.text import short_duration
from lapclip.training.cuda_graph import WARM_UP, AnyStep, make_step
from lapclip.training.feed import ready
from lapclip.training.memory import SHARE_OF_MEMORY, predict_bytes
from lapclip.tuning.kernels import choose_kernels
from lapclip.tuning.step_fits import (
    BATCHES,
    CAPTION_TOKENS,
    MEASURED_SIZES,
    Cell,
    Contestant,
    ModelSize,
    add_fitted_ms,
    empty_cell,
    find_crossover,
    fit_cells,
    predict_larger_models,
    recommend,
)

FORMAT = 1  # of the JSON object
QUICK_SECONDS = 70.0
SECONDS = 600.0
MAX_BUDGET_SHARE = 1 / 30  # of one cell
TIMED_BUDGET_SHARE = 1 / 500  # spent on the timed steps of a cell
MAX_TIMED_SECONDS = 1.0
TYPICAL_SIZE = ModelSize(384, 8)  # kernels of a contestant are chosen once, for this
TYPICAL_BATCH = 16
# All threads are useful for a step of half a second. The slowest energy counters, which are read
# ten times a second, need as long.
LONG_SECONDS = 0.5


def list_contestants() -> list[Contestant]:
    """Return every device in float32 and half precision. A CPU alone also has fewer threads."""
    threads, devices = default_threads(), available()
    contestants = []
    for device in devices:
        # Against an accelerator the CPU takes the fastest number of threads.
        finds_threads = device.is_cpu and len(devices) > 1
        device_threads = 0 if finds_threads else threads
        for dtype in ("float32", device.half):
            contestants.append(Contestant(device.kind, dtype, device_threads))
    if len(devices) == 1 and threads > 1:
        contestants.append(Contestant(devices[0].kind, "float32", threads // 2))
    return contestants


def compare_devices(
    seconds: float,
    status: Status,
    sizes: Sequence[ModelSize] = MEASURED_SIZES,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Time every cell that fits into memory and time, and return what follows, as JSON has it."""
    busy = describe_busy_cores()
    cells = Comparison(list_contestants(), seconds, status).measure(sizes, batches)
    fits = fit_cells(cells)
    cells = add_fitted_ms(cells, fits)
    return {
        "format": FORMAT,
        "machine": facts.machine_facts(),
        "devices": {device.kind: device.label for device in available()},
        "torch": str(torch.__version__),
        "lapclip": __version__,
        "warnings": [busy] if busy else [],
        "cells": [asdict(cell) for cell in cells],
        "fits": [asdict(fit) for fit in fits],
        "crossover": find_crossover(cells),
        "predictions": predict_larger_models(fits),
        "recommendations": recommend(cells),
    }


@dataclass(frozen=True)
class TimedStep:
    """The time of a step, with the threads that it took."""

    seconds: float
    threads: int
    joules: float | None = None
    """Energy of a step. None if the machine does not report it."""


class Comparison:
    """One comparison: contestants that take turns at cells, within a budget."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        seconds: float,
        status: Status,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.contestants, self.status = contestants, status
        self.seconds, self.clock, self.start = seconds, clock, clock()
        self.cells: list[Cell] = []
        self._model: tuple[ModelSize, CLIP] | None = None

    @property
    def seconds_left(self) -> float:
        return self.seconds - (self.clock() - self.start)

    def measure(self, sizes: Sequence[ModelSize], batches: Sequence[int]) -> list[Cell]:
        """Time the cells, small models first. What would take too long is left to the fits.

        Every other batch of all sizes comes first: a short comparison also reaches large models.
        """
        settings = {contestant: self.settings_of(contestant) for contestant in self.contestants}
        places = []
        for some_batches in (batches[::2], batches[1::2]):
            for size in sizes:
                places += [(size, batch) for batch in some_batches]
        total = len(places) * len(self.contestants)
        for size, batch in places:
            for contestant in self.contestants:
                cell = empty_cell(contestant, size, batch)
                left = short_duration(max(0.0, self.seconds_left))
                self.status(
                    f"{cell.parameters / 1e6:.3g} M parameters, batch {batch}, {contestant}; "
                    f"cell {len(self.cells) + 1} of {total}, at most {left} left for them"
                )
                train = replace(settings[contestant], batch_size=batch)
                self.cells.append(self.fill(cell, size, train))
        order = {contestant: at for at, contestant in enumerate(self.contestants)}
        return sorted(
            self.cells, key=lambda cell: (cell.parameters, order[cell.contestant], cell.batch)
        )

    def settings_of(self, contestant: Contestant) -> TrainConfig:
        """Return the settings of `lapclip train`, with kernels for a typical size."""
        self.status(f"kernels, {contestant}")
        device = device_of(contestant.device)
        prepare_device(device, contestant.threads or default_threads())
        train = TrainConfig(
            batch_size=TYPICAL_BATCH,
            device=device.kind,
            dtype=contestant.dtype,
            compile="graph" if device.records_graphs else "none",
            steps=1,
        )
        forms, _ = choose_kernels(TYPICAL_SIZE.shape, train, CAPTION_TOKENS, device)
        return replace(train, **forms)

    def fill(self, cell: Cell, size: ModelSize, train: TrainConfig) -> Cell:
        """Time a cell, or note why it is not run."""
        device = device_of(cell.device)
        needed = predict_bytes(size.shape, train, CAPTION_TOKENS).total
        if device.shares_memory:
            needed += 4 * cell.parameters  # the weights that all contestants start from
        free = device.free_bytes()
        if needed > SHARE_OF_MEMORY * free:
            reason = f"predicted {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
            return replace(cell, skipped=reason, too_large=True)
        if self.seconds_left < 0:
            return replace(cell, skipped="no time was left")
        step_seconds = self.expect_seconds(cell)
        if 3 * step_seconds > min(self.seconds * MAX_BUDGET_SHARE, self.seconds_left):
            reason = f"about {step_seconds:.2g} s a step is too long for this comparison"
            return replace(cell, skipped=reason)
        return self.time_cell(cell, size, train)

    def own_cells(self, cell: Cell) -> list[Cell]:
        """Return the cells of the same contestant that were timed."""
        return [other for other in self.cells if other.contestant == cell.contestant and other.ms]

    def nearest_cell(self, cell: Cell) -> Cell | None:
        """Return the contestant's timed cell whose work is closest."""
        distances = {
            at: abs(np.log(other.work / cell.work)) for at, other in enumerate(self.own_cells(cell))
        }
        if not distances:
            return None
        return self.own_cells(cell)[min(distances, key=distances.__getitem__)]

    def expect_seconds(self, cell: Cell) -> float:
        """Return about the seconds of a step, by its work and by its weights. 0 if unknown."""
        nearest = self.nearest_cell(cell)
        if nearest is None or nearest.ms is None:
            return 0.0
        by_work = nearest.ms * max(1.0, cell.work / nearest.work)
        # The cell with the largest model and the least work shows what updating weights takes.
        lightest = min(self.own_cells(cell), key=lambda other: (-other.parameters, other.work))
        by_weights = 0.0
        if cell.work > lightest.work:
            by_weights = (lightest.ms or 0.0) * cell.parameters / lightest.parameters
        return max(by_work, by_weights) / 1e3

    def time_cell(self, cell: Cell, size: ModelSize, train: TrainConfig) -> Cell:
        """Time the steps of a cell."""
        device = device_of(cell.device)
        batch = random_batch(size.shape, cell.batch)
        timed_seconds = min(MAX_TIMED_SECONDS, self.seconds * TIMED_BUDGET_SHARE)
        try:
            with device.watch_peak() as peak:
                model = copy.deepcopy(self.model_of(size)).to(device.torch)
                step = make_step(model, train, device)
                time_with = functools.partial(time_steps, step, batch, device, timed_seconds)
                if cell.threads:
                    timed = time_with(cell.threads)
                else:
                    nearest, all_threads = self.nearest_cell(cell), default_threads()
                    start = nearest.used_threads if nearest else None
                    start = start or max(1, all_threads // 4)
                    timed = self.find_threads(time_with, start, all_threads)
        except Exception as error:  # its kind alone: messages may hold paths
            return replace(cell, skipped=f"does not run here ({type(error).__name__})")
        return replace(
            cell,
            ms=timed.seconds * 1e3,
            pairs_per_second=cell.batch / timed.seconds,
            peak_memory_bytes=peak.added,
            joules=timed.joules,
            used_threads=timed.threads,
        )

    def model_of(self, size: ModelSize) -> CLIP:
        """Return a model of this size. The last one is kept: drawing its weights takes long."""
        if self._model is None or self._model[0] != size:
            self._model = size, CLIP(size.shape)
        return self._model[1]

    def find_threads(
        self, time_with: Callable[[int], TimedStep], start: int, all_threads: int
    ) -> TimedStep:
        """Double the threads as long as that is faster, and halve them if it is not."""
        timed = {start: time_with(start)}
        best = timed[start]
        if best.seconds > LONG_SECONDS and start == all_threads:
            return best
        for factor in (2.0, 0.5):
            while self.seconds_left > 0:
                threads = min(all_threads, max(1, round(factor * best.threads)))
                if threads in timed:
                    break
                timed[threads] = time_with(threads)
                if timed[threads].seconds < best.seconds:
                    best = timed[threads]
        return best


def time_steps(
    step: AnyStep, batch: Batch, device: Device, seconds: float, threads: int
) -> TimedStep:
    """Time two steps or more, for so many seconds, after those that set things up."""
    prepare_device(device, threads)
    stopwatch = Stopwatch(device.synchronise, on=False)
    prepared_batch = ready(step, batch, 1)

    def run() -> None:
        step(prepared_batch, 1, 0.0, stopwatch)()

    timer = Timer(device.synchronise)
    warm_up_steps = 1 if device.is_cpu else WARM_UP + 2
    for _ in range(warm_up_steps):
        run()
    energy = Energy()
    timing = timer.time_until(
        run, lambda timing: len(timing.seconds) >= 2 and timing.total >= seconds
    )
    joules = None
    if timing.total > LONG_SECONDS:
        joules = of_device(energy.joules(), device.kind)
    if joules is not None and not energy.at_least:
        joules /= len(timing.seconds)
    else:
        joules = None
    return TimedStep(timing.median, threads, joules)


def random_batch(shape: ModelConfig, batch: int) -> Batch:
    """Return a batch of random pixels and captions."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, shape.vocabulary - 2, (batch, CAPTION_TOKENS))
    tokens[:, -1] = shape.vocabulary - 1  # the end of the caption
    pixels = draw.integers(0, 256, (batch, shape.image_size, shape.image_size, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(batch, dtype=bool), np.zeros(batch, dtype=bool))

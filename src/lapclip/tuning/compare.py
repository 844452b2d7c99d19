"""Compare the CPU with the accelerator: whole training steps over sizes of model and batch.

With the CPU alone, its precisions and numbers of threads are compared instead.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from lapclip import __version__
from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine import facts
from lapclip.machine.choose_device import available, default_threads, device_of, prepare_device
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.measure.timing import Clock
from lapclip.model.clip import CLIP
from lapclip.progress import Status
from lapclip.text import short_duration
from lapclip.training.cuda_graph import make_step
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
from lapclip.tuning.trial import Trial

QUICK_SECONDS = 70.0
SECONDS = 600.0
MAX_BUDGET_SHARE = 1 / 30  # of one cell
TIMED_BUDGET_SHARE = 1 / 500  # spent on the timed steps of a cell
MAX_TIMED_SECONDS = 1.0
TYPICAL_SIZE = ModelSize(384, 8)  # kernels of a contestant are chosen once, for this
TYPICAL_BATCH = 16


def list_contestants() -> list[Contestant]:
    """Return every device in float32 and half precision, and the CPU with half of its threads."""
    threads = default_threads()
    contestants = []
    for device in available():
        for dtype in ("float32", device.half):
            contestants.append(Contestant(device.kind, dtype, threads))
        if device.is_cpu and threads > 1:
            contestants.append(Contestant(device.kind, "float32", threads // 2))
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
        prepare_device(device, contestant.threads)
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

    def timed_cells(self, contestant: Contestant) -> list[Cell]:
        return [cell for cell in self.cells if cell.contestant == contestant and cell.ms]

    def expect_seconds(self, cell: Cell) -> float:
        """Return about the seconds of a step, by its work and by its weights. 0 if unknown."""
        timed = self.timed_cells(cell.contestant)
        if not timed:
            return 0.0
        nearest = min(timed, key=lambda other: abs(math.log(other.work / cell.work)))
        by_work = (nearest.ms or 0.0) * max(1.0, cell.work / nearest.work)
        # The cell with the largest model and the least work shows what updating weights takes.
        lightest = min(timed, key=lambda other: (-other.parameters, other.work))
        by_weights = 0.0
        if cell.work > lightest.work:
            by_weights = (lightest.ms or 0.0) * cell.parameters / lightest.parameters
        return max(by_work, by_weights) / 1e3

    def time_cell(self, cell: Cell, size: ModelSize, train: TrainConfig) -> Cell:
        """Time the steps of a cell."""
        device = device_of(cell.device)
        batch = random_batch(size.shape, cell.batch)
        timed_seconds = min(MAX_TIMED_SECONDS, self.seconds * TIMED_BUDGET_SHARE)
        prepare_device(device, cell.threads)
        try:
            with device.watch_peak() as peak:
                model = copy.deepcopy(self.model_of(size)).to(device.torch)
                trial = Trial(make_step(model, train, device), batch, device)
                trial.warm_up()
                timing = trial.timer.time_until(
                    trial.step_once,
                    lambda timing: len(timing.seconds) >= 2 and timing.total >= timed_seconds,
                )
        except Exception as error:  # its kind alone: messages may hold paths
            return replace(cell, skipped=f"does not run here ({type(error).__name__})")
        return replace(
            cell,
            ms=timing.median * 1e3,
            pairs_per_second=cell.batch / timing.median,
            peak_memory_bytes=peak.added,
        )

    def model_of(self, size: ModelSize) -> CLIP:
        """Return a model of this size. The last one is kept: drawing its weights takes long."""
        if self._model is None or self._model[0] != size:
            self._model = size, CLIP(size.shape)
        return self._model[1]


def random_batch(shape: ModelConfig, batch: int) -> Batch:
    """Return a batch of random pixels and captions."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, shape.vocabulary - 2, (batch, CAPTION_TOKENS))
    tokens[:, -1] = shape.vocabulary - 1  # the end of the caption
    pixels = draw.integers(0, 256, (batch, shape.image_size, shape.image_size, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(batch, dtype=bool), np.zeros(batch, dtype=bool))

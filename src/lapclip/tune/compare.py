"""The CPU against every accelerator here: whole training steps over sizes of model and batch.

With one device only, its precisions and numbers of threads are compared instead.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapclip import __version__
from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine import devices, facts
from lapclip.machine.devices import Device
from lapclip.machine.energy import Energy
from lapclip.machine.peak import PeakMemory
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.train.graph import WARM_UP, AnyStep, make_step
from lapclip.train.memory import predict_bytes
from lapclip.tune.fits import Cell, Contestant, crossover, fit, predictions, recommendations
from lapclip.tune.kernels import choose_kernels
from lapclip.tune.ladder import BATCHES, CAPTION_TOKENS, MEASURED, Rung
from lapclip.tune.measure import Tell

FORMAT = 1
QUICK_SECONDS, SECONDS = 70.0, 600.0
SHARE_OF_BUDGET = 10
"""A single cell may take one part in so many of the budget."""
TYPICAL = Rung(384, 8), 16
"""The size and batch at which a contestant's kernels are chosen, once for all cells."""
SHARE_OF_MEMORY = 0.8


def contestants() -> list[Contestant]:
    """CPU and accelerators in float32 and half precision; a CPU alone also with fewer threads."""
    threads = devices.default_threads()
    here = devices.available()
    found = [Contestant(device.kind, dtype, threads) for device in here for dtype in ("float32", device.half)]
    if len(here) == 1 and threads > 1:
        found.append(Contestant("cpu", "float32", max(1, threads // 2)))
    return found


def compare(
    seconds: float, tell: Tell, rungs: Sequence[Rung] = MEASURED, batches: Sequence[int] = BATCHES
) -> dict[str, Any]:
    """Every cell that fits into memory and time, and what they say together."""
    cells = measure_cells(contestants(), rungs, batches, seconds, tell)
    fits = fit(cells)
    return {
        "format": FORMAT,
        "machine": facts.machine_facts(),
        "torch": str(torch.__version__),
        "lapclip": __version__,
        "cells": [asdict(cell) for cell in cells],
        "fits": [asdict(one) for one in fits],
        "crossover": crossover(cells, fits),
        "predictions": predictions(fits),
        "recommendations": recommendations(cells),
    }


def measure_cells(
    among: Sequence[Contestant], rungs: Sequence[Rung], batches: Sequence[int], seconds: float, tell: Tell
) -> list[Cell]:
    """Small models first, contestants in turns, batches growing; what would take too long is left to the fit."""
    ends = time.perf_counter() + seconds
    cells: list[Cell] = []
    settings = {contestant: _settings(contestant, tell) for contestant in among}
    for rung in rungs:
        for contestant in among:
            for batch in batches:
                cell = Cell(**asdict(contestant), model=rung.shape.name, parameters=rung.parameters,
                            work=rung.work(batch), batch=batch)  # fmt: skip
                tell(f"{rung.parameters / 1e6:.3g} M parameters, batch {batch}, {contestant.text()}")
                train = replace(settings[contestant], batch_size=batch)
                reason = _too_much(cell, rung, train, cells, seconds, ends)
                cells.append(replace(cell, skipped=reason) if reason else _measured(cell, rung, train))
    return cells


def _too_much(
    cell: Cell, rung: Rung, train: TrainConfig, cells: Sequence[Cell], seconds: float, ends: float
) -> str | None:
    """Why a cell is not run, if so: its memory, or its time as the nearest cell before it suggests."""
    free = Device(cell.device).free_bytes()
    needed = predict_bytes(rung.shape, train, CAPTION_TOKENS).total
    if needed > SHARE_OF_MEMORY * free:
        return f"predicted {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
    own = [other for other in cells if other.contestant == cell.contestant and other.ms]
    if not own:
        return None
    nearest = min(own, key=lambda other: abs(np.log(other.work / cell.work)))
    step = (nearest.ms or 0.0) / 1e3 * max(1.0, cell.work / nearest.work, cell.parameters / nearest.parameters)
    if 3 * step > min(seconds / SHARE_OF_BUDGET, max(0.0, ends - time.perf_counter())):
        return f"about {step:.1f} s a step is too long for this comparison"
    return None


def _measured(cell: Cell, rung: Rung, train: TrainConfig) -> Cell:
    device = Device(cell.device)
    devices.prepare(device, cell.threads)
    try:
        with PeakMemory(device) as peak:
            step = make_step(CLIP(rung.shape).to(device.torch), train, device)
            seconds, joules = _time_steps(step, _random_batch(rung, cell.batch), device)
    except Exception as error:
        return replace(cell, skipped=(str(error).strip().splitlines() or [type(error).__name__])[0][:100])
    pairs = cell.batch / seconds
    return replace(cell, ms=seconds * 1e3, pairs_per_second=pairs, peak_memory_bytes=peak.bytes, joules=joules)


def _time_steps(step: AnyStep, batch: Batch, device: Device) -> tuple[float, float | None]:
    """The median seconds of a step, after those that set things up, and its joules where the machine counts them."""
    off = Stopwatch(device.synchronise, on=False)
    for _ in range(1 if device.is_cpu else WARM_UP + 2):
        step(batch, 1, 0.0, off)()
    times: list[float] = []
    energy = Energy()
    while len(times) < 2 or (sum(times) < 0.3 and len(times) < 20):
        device.synchronise()
        began = time.perf_counter()
        step(batch, 1, 0.0, off)()
        device.synchronise()
        times.append(time.perf_counter() - began)
    used = energy.joules()
    return statistics.median(times), sum(used.values()) / len(times) if used else None


def _settings(contestant: Contestant, tell: Tell) -> TrainConfig:
    """As `lapclip train` would have them, with the kernels that suit a typical size."""
    tell(f"kernels, {contestant.text()}")
    device = Device(contestant.device)
    devices.prepare(device, contestant.threads)
    rung, batch = TYPICAL
    how = "graph" if device.records_graphs else "none"
    train = TrainConfig(batch_size=batch, dtype=contestant.dtype, compile=how, steps=1, device=contestant.device)
    forms, _ = choose_kernels(rung.shape, train, CAPTION_TOKENS, device)
    return replace(train, **forms)


def _random_batch(rung: Rung, batch: int) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, rung.shape.vocabulary - 2, (batch, CAPTION_TOKENS))
    tokens[:, -1] = rung.shape.vocabulary - 1
    pixels = draw.integers(0, 256, (batch, rung.shape.image_size, rung.shape.image_size, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(batch, dtype=bool), np.zeros(batch, dtype=bool))


def read_shared(path: Path) -> dict[str, Any]:
    """Another machine's comparison."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not all(
            key in found for key in ("machine", "cells", "fits", "crossover", "recommendations")
        ):
            raise ValueError("it has another format")
        [Cell(**cell) for cell in found["cells"]]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a comparison written by lapclip compare --share: {error}.",
            hint="lapclip compare --share FILE on the other machine",
        ) from None
    return found

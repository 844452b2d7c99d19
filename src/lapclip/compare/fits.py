"""What follows from timed cells: a fit for each contestant, where one overtakes another, what larger models cost.

time = overhead + layers x (time of a layer) + parameters x (time to update one) + work / rate. The overhead is what a
step costs however small it is; a layer cannot begin before the one below has ended, however little it has to do;
updating reads and writes every weight whatever the batch; the rest is arithmetic.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lapclip.config import ModelConfig
from lapclip.measure.timing import MIN_SPEEDUP
from lapclip.model.clip import CLIP, count_parameters
from lapclip.tuning.flops import operations, step_products

CAPTION_TOKENS = 32
"""About a sentence."""
BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Rung:
    """A size of model: both towers as wide and deep as each other, images of 224 pixels in patches of 32."""

    width: int
    layers: int

    @cached_property
    def shape(self) -> ModelConfig:
        return ModelConfig(
            name=f"{self.width} wide, {self.layers} deep",
            image_size=224,
            patch=32,
            image_width=self.width,
            image_layers=self.layers,
            image_heads=self.width // 64,
            text_width=self.width,
            text_layers=self.layers,
            text_heads=self.width // 64,
            embedding=self.width,
            vocabulary=512,
            context=77,
        )

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):  # counts without filling memory
            return count_parameters(CLIP(self.shape))

    def work(self, batch: int) -> float:
        """Operations of a training step."""
        return operations(step_products(self.shape, batch, CAPTION_TOKENS))


MEASURED = (
    Rung(128, 2),
    Rung(192, 6),
    Rung(384, 8),
    Rung(512, 12),
    Rung(768, 12),
    Rung(1024, 12),
    Rung(1024, 20),
)
"""1 M to 500 M parameters."""
PREDICTED = (Rung(768, 14), Rung(1024, 20), Rung(1280, 25))
"""200 M, 500 M and 1 B parameters: the scaling study."""


LEAST_CELLS = 4
"""With fewer there is no fit."""


@dataclass(frozen=True)
class Contestant:
    """What a model can be trained with."""

    device: str
    dtype: str
    threads: int
    """0: as many as are fastest, found for each cell."""

    def text(self) -> str:
        threads = (
            f", {self.threads} thread{'s' * (self.threads != 1)}"
            if self.device == "cpu" and self.threads
            else ""
        )
        return f"{self.device} {self.dtype}{threads}"


@dataclass(frozen=True)
class Cell:
    """One model and batch with one contestant: what a step took, or why it was not run."""

    device: str
    dtype: str
    threads: int
    model: str
    parameters: int
    work: float
    batch: int
    layers: int = 0
    used_threads: int | None = None
    ms: float | None = None
    pairs_per_second: float | None = None
    peak_memory_bytes: int | None = None
    joules: float | None = None
    fitted_ms: float | None = None
    skipped: str | None = None
    too_large: bool = False
    """Not run because its memory does not suffice, so that no fit may speak for it."""

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.device, self.dtype, self.threads)


@dataclass(frozen=True)
class Fit:
    """The time of a step as a function of model and batch."""

    device: str
    dtype: str
    threads: int
    overhead_ms: float
    ms_per_layer: float
    ns_per_parameter: float
    flops_per_second: float
    error: float
    """Median relative error on cells that the fit did not see, each left out in turn."""

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.device, self.dtype, self.threads)

    def ms(self, layers: int, parameters: float, work: float) -> float:
        arithmetic = work / self.flops_per_second if self.flops_per_second else 0.0
        fixed = self.overhead_ms + layers * self.ms_per_layer
        return fixed + parameters * self.ns_per_parameter / 1e6 + arithmetic * 1e3


def fit(cells: Sequence[Cell]) -> list[Fit]:
    """A fit for each contestant with enough cells."""
    fits = []
    for contestant in dict.fromkeys(cell.contestant for cell in cells):
        own = [cell for cell in cells if cell.contestant == contestant and cell.ms is not None]
        if len(own) < LEAST_CELLS:
            continue
        # What depends on the size of the model cannot be told apart with few sizes.
        sizes = len({cell.parameters for cell in own})
        known = np.array([True, sizes > 3, sizes > 1, True])
        table = np.array([[1.0, cell.layers, cell.parameters, cell.work] for cell in own]) * known
        ms = np.array([cell.ms for cell in own])
        errors = []
        for left_out in range(len(own)):
            rest = np.arange(len(own)) != left_out
            predicted = table[left_out] @ _least_squares(table[rest], ms[rest])
            errors.append(abs(predicted - ms[left_out]) / ms[left_out])
        overhead, layer, update, arithmetic = _least_squares(table, ms)
        rate = 1e3 / arithmetic if arithmetic else 0.0
        fits.append(Fit(**asdict(contestant), overhead_ms=overhead, ms_per_layer=layer, ns_per_parameter=update * 1e6,
                        flops_per_second=rate, error=statistics.median(errors)))  # fmt: skip
    return fits


def fitted(cells: Sequence[Cell], fits: Sequence[Fit]) -> list[Cell]:
    """Each cell with what the fit says of it, run or not."""
    by_contestant = {one.contestant: one for one in fits}
    return [
        replace(
            cell,
            fitted_ms=by_contestant[cell.contestant].ms(cell.layers, cell.parameters, cell.work),
        )
        if cell.contestant in by_contestant and not cell.too_large
        else cell
        for cell in cells
    ]


def _least_squares(table: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Coefficients that are not negative, with the least relative error: the best of every choice of columns."""
    scaled = table / ms[:, None]
    best, least = np.zeros(table.shape[1]), np.inf
    useful = np.flatnonzero(scaled.any(axis=0))
    for size in range(1, len(useful) + 1):
        for columns in itertools.combinations(useful, size):
            chosen = scaled[:, columns]
            norms = np.linalg.norm(chosen, axis=0)
            found = np.linalg.lstsq(chosen / norms, np.ones(len(ms)), rcond=None)[0] / norms
            residual = float(np.sum((chosen @ found - 1) ** 2))
            if (found >= 0).all() and residual < least:
                best, least = np.zeros(table.shape[1]), residual
                best[list(columns)] = found
    return best


def crossover(cells: Sequence[Cell]) -> dict[str, Any]:
    """From which size of model on the accelerator wins, at each batch: by the cells, or by the fit of those not run."""
    kinds = list(dict.fromkeys(cell.device for cell in cells))
    if len(kinds) < 2:
        return {"text": _among_one(cells), "points": []}
    accelerator = next(kind for kind in kinds if kind != "cpu")
    points = []
    for batch in BATCHES:
        sizes = sorted({cell.parameters for cell in cells if cell.batch == batch})
        wins = {size: _winner(cells, size, batch) for size in sizes}
        first = next(
            (s for s in sizes if all(wins[t] == accelerator for t in sizes if t >= s)), None
        )
        if sizes:
            points.append({"batch": batch, "parameters": first})
    known = [point for point in points if point["parameters"] is not None]
    if not known:
        text = f"the CPU wins everywhere that was tried against {accelerator}"
        return {"text": text, "points": points}
    where = "; ".join(
        f"from {_size(point['parameters'])} parameters at batch {point['batch']}" for point in known
    )
    smallest = min(cell.parameters for cell in cells)
    everywhere = len(known) == len(points) and all(
        point["parameters"] == smallest for point in known
    )
    text = (
        f"{accelerator} wins everywhere that was tried"
        if everywhere
        else f"{accelerator} wins {where}"
    )
    return {"text": text, "points": points}


def _winner(cells: Sequence[Cell], parameters: int, batch: int) -> str | None:
    """The device with the shortest step; where a cell was not run, its fit speaks for it."""
    times: dict[str, float] = {}
    for cell in cells:
        ms = cell.ms if cell.ms is not None else cell.fitted_ms
        if (cell.parameters, cell.batch) == (parameters, batch) and ms is not None:
            times[cell.device] = min(ms, times.get(cell.device, ms))
    return min(times, key=times.__getitem__) if times else None


def _among_one(cells: Sequence[Cell]) -> str:
    """With one device there is no crossover; say which precision and threads win, over the cells that all have."""
    totals: dict[Contestant, list[float]] = {}
    for (_, _), group in itertools.groupby(
        sorted((cell for cell in cells if cell.ms), key=lambda cell: (cell.parameters, cell.batch)),
        key=lambda cell: (cell.parameters, cell.batch),
    ):
        together = list(group)
        fastest = min(cell.ms for cell in together if cell.ms)
        for cell in together:
            if len(together) > 1 and cell.ms:
                totals.setdefault(cell.contestant, []).append(cell.ms / fastest)
    device = cells[0].device if cells else "nothing"
    if not totals:
        return f"{device} is the only device here"
    means = {contestant: statistics.geometric_mean(ratios) for contestant, ratios in totals.items()}
    best = min(means, key=means.__getitem__)
    others = ", ".join(
        f"{means[other] / means[best]:.2f}x {other.text()}" for other in means if other != best
    )
    return f"{device} is the only device here, so precisions and threads are compared: {best.text()} is {others}"


def predictions(
    fits: Sequence[Fit], rungs: Sequence[Rung] = PREDICTED, batches: Sequence[int] = (16, 256)
) -> list[dict]:
    """What a step of larger models would take, by the fits."""
    return [
        {**asdict(one.contestant), "parameters": rung.parameters, "batch": batch, "ms": ms,
         "pairs_per_second": batch / ms * 1e3, "error": one.error}
        for rung in rungs for batch in batches for one in fits
        if (ms := one.ms(rung.layers, rung.parameters, rung.work(batch))) > 0
    ]  # fmt: skip


def recommendations(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For each size of model what trained the most pairs a second, and how it compares at a batch that others ran."""
    found = []
    for parameters in sorted({cell.parameters for cell in cells}):
        own = [cell for cell in cells if cell.parameters == parameters and cell.ms]
        if not own:
            continue
        best = max(own, key=lambda cell: cell.pairs_per_second or 0.0)
        rate = best.pairs_per_second or 0.0
        text = f"{best.contestant.text()}, {rate:,.{0 if rate >= 10 else 1}f} pairs/s at batch {best.batch}"
        text += _compared(best, own)
        found.append(
            {**asdict(best.contestant), "parameters": parameters, "batch": best.batch, "text": text}
        )
    return found


def _compared(best: Cell, own: Sequence[Cell]) -> str:
    """Against the fastest of the others, at the largest batch that the best and another ran."""
    mine = {cell.batch: cell for cell in own if cell.contestant == best.contestant}
    others = [cell for cell in own if cell.contestant != best.contestant and cell.batch in mine]
    if not others:
        return ", nothing else was run"
    batch = max(cell.batch for cell in others)
    second = min((cell for cell in others if cell.batch == batch), key=lambda cell: cell.ms or 0.0)
    lead = (second.ms or 0.0) / (mine[batch].ms or 1.0)
    at = "" if batch == best.batch else f" at batch {batch}"
    if 1 / MIN_SPEEDUP < lead < MIN_SPEEDUP:
        return f",{at} as fast as {second.contestant.text()}"
    return f",{at} {lead:.2f}x {second.contestant.text()}"


def _size(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"

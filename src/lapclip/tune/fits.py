"""From timed cells to what they say: a fit for each contestant, where one overtakes another, what larger models cost.

time = overhead + parameters x (time to update one) + work / rate. The overhead is what a step costs however small it
is, launches above all; updating reads and writes every weight whatever the batch; the rest is arithmetic.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lapclip.tune.ladder import BATCHES, PREDICTED, Rung

LEAST_CELLS = 4
"""A fit of three figures needs more than three cells."""


@dataclass(frozen=True)
class Contestant:
    """What a model can be trained with."""

    device: str
    dtype: str
    threads: int

    def text(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.device == "cpu" else ""
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
    ms: float | None = None
    pairs_per_second: float | None = None
    peak_memory_bytes: int | None = None
    joules: float | None = None
    skipped: str | None = None

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
    ns_per_parameter: float
    flops_per_second: float
    error: float
    """Median relative error on cells that the fit did not see, each left out in turn."""

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.device, self.dtype, self.threads)

    def ms(self, parameters: float, work: float) -> float:
        arithmetic = work / self.flops_per_second if self.flops_per_second else 0.0
        return self.overhead_ms + parameters * self.ns_per_parameter / 1e6 + arithmetic * 1e3


def fit(cells: Sequence[Cell]) -> list[Fit]:
    """A fit for each contestant with enough cells."""
    fits = []
    for contestant in dict.fromkeys(cell.contestant for cell in cells):
        own = [cell for cell in cells if cell.contestant == contestant and cell.ms is not None]
        if len(own) < LEAST_CELLS:
            continue
        table = np.array([[1.0, cell.parameters, cell.work] for cell in own])
        ms = np.array([cell.ms for cell in own])
        errors = []
        for left_out in range(len(own)):
            rest = np.arange(len(own)) != left_out
            predicted = table[left_out] @ _least_squares(table[rest], ms[rest])
            errors.append(abs(predicted - ms[left_out]) / ms[left_out])
        overhead, update, arithmetic = _least_squares(table, ms)
        rate = 1e3 / arithmetic if arithmetic else 0.0
        fits.append(Fit(**asdict(contestant), overhead_ms=overhead, ns_per_parameter=update * 1e6,
                        flops_per_second=rate, error=statistics.median(errors)))  # fmt: skip
    return fits


def _least_squares(table: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Coefficients that are not negative, with the least relative error: the best of every choice of columns."""
    scaled = table / ms[:, None]
    best, least = np.zeros(table.shape[1]), np.inf
    for size in range(1, table.shape[1] + 1):
        for columns in itertools.combinations(range(table.shape[1]), size):
            part = scaled[:, columns]
            norms = np.linalg.norm(part, axis=0)
            found = np.linalg.lstsq(part / norms, np.ones(len(ms)), rcond=None)[0] / norms
            residual = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and residual < least:
                best, least = np.zeros(table.shape[1]), residual
                best[list(columns)] = found
    return best


def crossover(cells: Sequence[Cell], fits: Sequence[Fit]) -> dict[str, Any]:
    """From which size of model on the accelerator wins, at each batch: by the cells, between them by the fits."""
    kinds = list(dict.fromkeys(cell.device for cell in cells))
    if len(kinds) < 2:
        return {"text": _among_one(cells), "points": []}
    accelerator = next(kind for kind in kinds if kind != "cpu")
    points = []
    for batch in BATCHES:
        sizes = sorted({cell.parameters for cell in cells if cell.batch == batch})
        wins = {size: _winner(cells, fits, size, batch) for size in sizes}
        first = next((s for s in sizes if all(wins[t] == accelerator for t in sizes if t >= s)), None)
        if sizes:
            points.append({"batch": batch, "parameters": first})
    known = [point for point in points if point["parameters"] is not None]
    if not known:
        return {"text": f"the CPU wins everywhere that was tried against {accelerator}", "points": points}
    words = "; ".join(f"from {_size(point['parameters'])} parameters at batch {point['batch']}" for point in known)
    smallest = min(cell.parameters for cell in cells)
    everywhere = len(known) == len(points) and all(point["parameters"] == smallest for point in known)
    text = f"{accelerator} wins everywhere that was tried" if everywhere else f"{accelerator} wins {words}"
    return {"text": text, "points": points}


def _winner(cells: Sequence[Cell], fits: Sequence[Fit], parameters: int, batch: int) -> str | None:
    """The device with the shortest step; where a cell was not run, its fit speaks for it."""
    times: dict[str, float] = {}
    for cell in cells:
        if cell.parameters == parameters and cell.batch == batch:
            fitted = next(
                (fit.ms(cell.parameters, cell.work) for fit in fits if fit.contestant == cell.contestant), None
            )
            ms = cell.ms if cell.ms is not None else fitted
            if ms is not None:
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
    others = ", ".join(f"{means[other] / means[best]:.2f}x {other.text()}" for other in means if other != best)
    return f"{device} is the only device here, so precisions and threads are compared: {best.text()} is {others}"


def predictions(
    fits: Sequence[Fit], rungs: Sequence[Rung] = PREDICTED, batches: Sequence[int] = (16, 256)
) -> list[dict]:
    """What a step of larger models would take, by the fits."""
    return [
        {**asdict(one.contestant), "parameters": rung.parameters, "batch": batch, "ms": ms,
         "pairs_per_second": batch / ms * 1e3, "error": one.error}
        for rung in rungs for batch in batches for one in fits
        if (ms := one.ms(rung.parameters, rung.work(batch))) > 0
    ]  # fmt: skip


def recommendations(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For each size of model, what trained the most pairs a second."""
    found = []
    for parameters in sorted({cell.parameters for cell in cells}):
        own = [cell for cell in cells if cell.parameters == parameters and cell.pairs_per_second]
        if not own:
            continue
        best = max(own, key=lambda cell: cell.pairs_per_second or 0.0)
        text = f"{best.contestant.text()}, {best.pairs_per_second:,.1f} pairs/s at batch {best.batch}"
        found.append({**asdict(best.contestant), "parameters": parameters, "batch": best.batch, "text": text})
    return found


def _size(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"

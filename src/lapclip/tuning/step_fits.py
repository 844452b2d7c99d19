"""What follows from timed training steps: a fit per contestant, the crossover, and predictions.

A step takes: overhead + layers x (time of a layer) + parameters x (update) + work / rate.
The overhead is there however small a step is. A layer cannot begin before the one below has ended.
The update reads and writes every weight whatever the batch. The rest is arithmetic.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lapclip.config import ModelConfig
from lapclip.text import counted
from lapclip.text import parameters as describe_parameters
from lapclip.tuning.model_size import count_operations, count_parameters

CAPTION_TOKENS = 32  # about a sentence
BATCHES = (1, 4, 16, 64, 256)
PREDICTED_BATCHES = (16, 256)
MIN_CELLS = 4  # for a fit


@dataclass(frozen=True)
class ModelSize:
    """A model whose towers have the same width and depth, for images of 224 pixels."""

    width: int
    layers: int

    @property
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

    @property
    def parameters(self) -> int:
        return count_parameters(self.shape)

    def work(self, batch: int) -> float:
        """Return the operations of a training step."""
        return batch * count_operations(self.shape, 1, CAPTION_TOKENS)


# 1 M to 500 M parameters
MEASURED_SIZES = (
    ModelSize(128, 2),
    ModelSize(192, 6),
    ModelSize(384, 8),
    ModelSize(512, 12),
    ModelSize(768, 12),
    ModelSize(1024, 12),
    ModelSize(1024, 20),
)
# 200 M, 500 M and 1 B parameters
PREDICTED_SIZES = (ModelSize(768, 14), ModelSize(1024, 20), ModelSize(1280, 25))


@dataclass(frozen=True)
class Contestant:
    """What a model can be trained with."""

    device: str
    dtype: str
    threads: int

    def __str__(self) -> str:
        if self.device == "cpu":
            return f"{self.device} {self.dtype}, {counted(self.threads, 'thread')}"
        return f"{self.device} {self.dtype}"


@dataclass(frozen=True)
class Cell:
    """A step of one model and batch with one contestant: its time, or why it was not run."""

    device: str
    dtype: str
    threads: int
    model: str
    parameters: int
    work: float
    batch: int
    layers: int = 0
    ms: float | None = None
    pairs_per_second: float | None = None
    peak_memory_bytes: int | None = None
    fitted_ms: float | None = None
    skipped: str | None = None
    too_large: bool = False
    """Whether its memory does not suffice. No fit stands in for such a cell."""

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.device, self.dtype, self.threads)

    @property
    def size(self) -> tuple[int, int]:
        return self.parameters, self.batch

    @property
    def known_ms(self) -> float | None:
        """The measured time of a step, else the fitted one."""
        return self.fitted_ms if self.ms is None else self.ms


def empty_cell(contestant: Contestant, size: ModelSize, batch: int) -> Cell:
    """Return a cell that was not run yet."""
    return Cell(
        **asdict(contestant),
        model=size.shape.name,
        parameters=size.parameters,
        work=size.work(batch),
        batch=batch,
        layers=size.layers,
    )


@dataclass(frozen=True)
class Fit:
    """The time of a contestant's step as a function of model and batch."""

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
        """Return the milliseconds of a step."""
        milliseconds = self.overhead_ms + layers * self.ms_per_layer
        milliseconds += parameters * self.ns_per_parameter / 1e6
        if self.flops_per_second:
            milliseconds += 1e3 * work / self.flops_per_second
        return milliseconds


def fit_cells(cells: Sequence[Cell]) -> list[Fit]:
    """Fit every contestant that has enough cells."""
    fits = []
    for contestant in dict.fromkeys(cell.contestant for cell in cells):
        timed = [cell for cell in cells if cell.contestant == contestant and cell.ms is not None]
        if len(timed) >= MIN_CELLS:
            fits.append(fit_contestant(contestant, timed))
    return fits


def fit_contestant(contestant: Contestant, cells: Sequence[Cell]) -> Fit:
    """Fit the timed cells of one contestant."""
    # With few sizes of model, the terms that depend on it cannot be told apart.
    sizes = len({cell.parameters for cell in cells})
    is_fitted = np.array([True, sizes > 3, sizes > 1, True])
    terms = np.array([[1.0, cell.layers, cell.parameters, cell.work] for cell in cells]) * is_fitted
    ms = np.array([cell.ms for cell in cells])
    errors = []
    for left_out in range(len(cells)):
        others = np.arange(len(cells)) != left_out
        predicted_ms = terms[left_out] @ solve_least_squares(terms[others], ms[others])
        errors.append(abs(predicted_ms / ms[left_out] - 1))
    overhead, per_layer, per_parameter, per_operation = solve_least_squares(terms, ms)
    return Fit(
        **asdict(contestant),
        overhead_ms=overhead,
        ms_per_layer=per_layer,
        ns_per_parameter=per_parameter * 1e6,
        flops_per_second=1e3 / per_operation if per_operation else 0.0,
        error=statistics.median(errors),
    )


def solve_least_squares(terms: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Return the coefficients without negative ones that have the least relative error.

    Tries every choice of columns: there are four.
    """
    relative_terms = terms / ms[:, None]
    used_columns = np.flatnonzero(relative_terms.any(axis=0))
    best, least_error = np.zeros(terms.shape[1]), np.inf
    for count in range(1, len(used_columns) + 1):
        for columns in map(list, itertools.combinations(used_columns, count)):
            chosen = relative_terms[:, columns]
            norms = np.linalg.norm(chosen, axis=0)
            coefficients = np.linalg.lstsq(chosen / norms, np.ones(len(ms)))[0] / norms
            error = float(np.sum((chosen @ coefficients - 1) ** 2))
            if (coefficients >= 0).all() and error < least_error:
                best, least_error = np.zeros(terms.shape[1]), error
                best[columns] = coefficients
    return best


def add_fitted_ms(cells: Sequence[Cell], fits: Sequence[Fit]) -> list[Cell]:
    """Return the cells with the time that the fits give, whether or not they were run."""
    fit_of = {fit.contestant: fit for fit in fits}
    result = []
    for cell in cells:
        fit = fit_of.get(cell.contestant)
        if fit and not cell.too_large:
            cell = replace(cell, fitted_ms=fit.ms(cell.layers, cell.parameters, cell.work))
        result.append(cell)
    return result


def find_crossover(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return for each batch the model size from which on the accelerator wins, and a sentence."""
    devices = list(dict.fromkeys(cell.device for cell in cells))
    if len(devices) < 2:
        return {"text": f"{devices[0]} is the only device here", "points": []}
    accelerator = next(device for device in devices if device != "cpu")
    points = []
    for batch in BATCHES:
        sizes = sorted({cell.parameters for cell in cells if cell.batch == batch})
        if sizes:
            smallest_win = None
            for size in reversed(sizes):
                if find_winner(cells, (size, batch)) != accelerator:
                    break
                smallest_win = size
            points.append({"batch": batch, "parameters": smallest_win})
    wins = [point for point in points if point["parameters"] is not None]
    smallest = min(cell.parameters for cell in cells)
    if not wins:
        text = f"the CPU wins everywhere that was tried against {accelerator}"
    elif all(point["parameters"] == smallest for point in points):
        text = f"{accelerator} wins everywhere that was tried"
    else:
        places = [
            f"from {describe_parameters(point['parameters'])} parameters at batch {point['batch']}"
            for point in wins
        ]
        text = f"{accelerator} wins {'; '.join(places)}"
    return {"text": text, "points": points}


def find_winner(cells: Sequence[Cell], size: tuple[int, int]) -> str | None:
    """Return the device with the shortest step, measured or fitted."""
    times = {}
    for cell in cells:
        if cell.size == size and cell.known_ms is not None:
            times[cell.device] = min(cell.known_ms, times.get(cell.device, cell.known_ms))
    return min(times, key=times.__getitem__) if times else None


def predict_larger_models(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return the time of a step of larger models, by the fits."""
    predictions = []
    for size, batch, fit in itertools.product(PREDICTED_SIZES, PREDICTED_BATCHES, fits):
        ms = fit.ms(size.layers, size.parameters, size.work(batch))
        if ms > 0:
            prediction = {
                **asdict(fit.contestant),
                "parameters": size.parameters,
                "batch": batch,
                "ms": ms,
                "pairs_per_second": batch / ms * 1e3,
                "error": fit.error,
            }
            predictions.append(prediction)
    return predictions


def recommend(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return for each size of model what trained the most pairs per second."""
    recommendations = []
    for parameters in sorted({cell.parameters for cell in cells}):
        timed = [cell for cell in cells if cell.parameters == parameters and cell.ms]
        if not timed:
            continue
        best = max(timed, key=lambda cell: cell.pairs_per_second or 0.0)
        rate = best.pairs_per_second or 0.0
        digits = 0 if rate >= 10 else 1
        recommendation = {
            **asdict(best.contestant),
            "parameters": parameters,
            "batch": best.batch,
            "text": f"{best.contestant}, {rate:,.{digits}f} pairs/s at batch {best.batch}",
        }
        recommendations.append(recommendation)
    return recommendations

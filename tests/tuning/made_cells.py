"""Contestants, and cells as they would be if the time of a step followed a rule."""

from __future__ import annotations

from dataclasses import replace

from lapclip.tuning.step_fits import BATCHES, MEASURED_SIZES, Cell, Contestant, empty_cell

CPU, GPU = Contestant("cpu", "float32", 2), Contestant("cuda", "float32", 2)


def cells_of(
    contestant: Contestant,
    overhead: float,
    rate: float,
    sizes=MEASURED_SIZES,
    update: float = 0.0,
    layer: float = 0.0,
) -> list[Cell]:
    """Return cells as they would be if time were overhead, layers, updates and work alone."""
    cells = []
    for size in sizes:
        for batch in BATCHES:
            ms = overhead + size.layers * layer + size.parameters * update / 1e6
            ms += size.work(batch) / rate * 1e3
            cell = empty_cell(contestant, size, batch)
            cells.append(replace(cell, ms=ms, pairs_per_second=batch / ms * 1e3))
    return cells

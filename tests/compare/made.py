"""Contestants, and cells as they would be if the time of a step followed a rule."""

from __future__ import annotations

from dataclasses import asdict

from lapclip.compare.fits import BATCHES, MEASURED, Cell, Contestant

CPU, GPU = Contestant("cpu", "float32", 2), Contestant("cuda", "float32", 2)


def cells_of(
    contestant: Contestant,
    overhead: float,
    rate: float,
    rungs=MEASURED,
    update: float = 0.0,
    layer: float = 0.0,
) -> list[Cell]:
    """Cells as they would be if time were overhead, layers, updates and work alone."""
    return [
        Cell(**asdict(contestant), model=rung.shape.name, parameters=rung.parameters, work=rung.work(batch),
             batch=batch, layers=rung.layers, ms=ms, pairs_per_second=batch / ms * 1e3)
        for rung in rungs for batch in BATCHES
        if (ms := overhead + rung.layers * layer + rung.parameters * update / 1e6 + rung.work(batch) / rate * 1e3)
    ]  # fmt: skip

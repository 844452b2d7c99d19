"""Several machines against one: steps over sizes of model and batch, predicted and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lapclip.config import AUTO, TrainConfig
from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
from lapclip.machine.ranks import Ranks
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.progress import Status
from lapclip.training.cuda_graph import make_step
from lapclip.training.memory import SHARE_OF_MEMORY, predict_bytes
from lapclip.training.shards import UNDER_TORCHRUN
from lapclip.training.step import TrainStep
from lapclip.training.worth import WORTH_IT, Worth, measure_together
from lapclip.tuning.compare import random_batch
from lapclip.tuning.step_fits import CAPTION_TOKENS, ModelSize

RUNGS = (
    ModelSize(128, 2),
    ModelSize(192, 6),
    ModelSize(384, 8),
    ModelSize(512, 12),
    ModelSize(768, 12),
)
BATCHES = 16, 64, 256
SECONDS = 240.0
"""For all cells; what would take longer is left out."""
STEPS = 4
"""Of which the first is slower."""
PASSES = 14
"""About how many passes of a batch through a model on one machine a cell takes in all."""


def compare_together(
    ranks: Ranks,
    status: Status,
    rungs: Sequence[ModelSize] = RUNGS,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Time every size that memory and time allow, as the rank that writes chooses."""
    rows = []
    for rung, batch in _cells(ranks, rungs, batches, rows):
        status(f"{rung.parameters / 1e6:.3g} M parameters, batch {batch}, {ranks.count} machines")
        worth, seconds = _time(ranks, rung, batch)
        rows.append(
            {
                "model": rung.shape.name,
                "parameters": rung.parameters,
                "batch": batch,
                "work": rung.work(batch),
                "step_seconds": seconds,
                "halved_step_seconds": worth.step_seconds(halved=True),
                "advice": _advice(worth, batch, seconds),
                **worth.to_dict(),
            }
        )
    return {"machines": list(ranks.hosts), "cells": rows}


def _advice(worth: Worth, batch: int, seconds: float) -> str:
    """What to do: as predicted, unless what was measured says otherwise."""
    pays, advice = worth.alone_step_seconds >= WORTH_IT * seconds, worth.advice(batch)
    if pays == (not advice.startswith("alone")):
        return advice
    return "worth it, as measured" if pays else "alone is faster, as measured"


def _cells(
    ranks: Ranks, rungs: Sequence[ModelSize], batches: Sequence[int], rows: list[dict[str, Any]]
) -> Iterator[tuple[ModelSize, int]]:
    """What to time next, as the rank that writes says."""
    ends = time.perf_counter() + SECONDS
    wanted = iter([(rung, batch) for rung in rungs for batch in batches])
    while True:
        chosen = (
            next((cell for cell in wanted if _fits(*cell, rows, ends)), None)
            if ranks.writes
            else None
        )
        said = ranks.from_writer(
            chosen and [asdict(chosen[0]), chosen[1]], "choice of what is timed"
        )
        if said is None:
            return
        yield ModelSize(**said[0]), int(said[1])


def _fits(rung: ModelSize, batch: int, rows: list[dict[str, Any]], ends: float) -> bool:
    device, _ = choose_device(AUTO)
    train = TrainConfig(batch_size=batch, steps=1)
    if (
        2 * predict_bytes(rung.shape, train, CAPTION_TOKENS).total
        > SHARE_OF_MEMORY * device.free_bytes()
    ):
        return False
    expected = (
        rows[-1]["alone_step_seconds"] * max(1.0, rung.work(batch) / rows[-1]["work"])
        if rows
        else 0.0
    )
    return PASSES * expected < ends - time.perf_counter()


def _time(ranks: Ranks, rung: ModelSize, batch: int) -> tuple[Worth, float]:
    """What is predicted of one size, and what its steps take."""
    device, _ = choose_device(AUTO)
    prepare_device(device, default_threads())
    # The same kernels on all machines: what suits each best may differ.
    kernels = Compute()
    train = TrainConfig(
        batch_size=batch,
        steps=1,
        device=device.kind,
        threads=default_threads(),
        shards=min(UNDER_TORCHRUN, batch) if device.is_cpu else 0,
        dtype="float32",
        compile="none",
        image_attention=kernels.attention,
        text_attention=kernels.attention,
        linear=kernels.linear,
    )
    step = make_step(CLIP(rung.shape).to(device.torch), train, device)
    assert isinstance(step, TrainStep)
    pairs, off = random_batch(rung.shape, batch), Stopwatch(device.synchronise, on=False)
    ranks.speeds, ranks.overlaps = [1] * ranks.count, True
    worth = measure_together(step, pairs, train, device, ranks)
    step.ranks, ranks.speeds, ranks.overlaps = ranks, worth.shards, worth.overlaps
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step(pairs, 1, 0.0, off)()
        taken.append(time.perf_counter() - began)
    return worth, ranks.from_writer(statistics.median(taken[1:]), "seconds")

"""Several machines against one: the same training steps, timed on one of them and on all."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from lapclip.config import AUTO, TrainConfig
from lapclip.data.batches import Batch, RankRows
from lapclip.machine.choose_device import choose_device, prepare_device
from lapclip.machine.device import Device
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.progress import Status
from lapclip.training.cuda_graph import make_step
from lapclip.training.distributed import Ranks
from lapclip.training.memory import SHARE_OF_MEMORY, predict_bytes
from lapclip.training.step import TrainStep
from lapclip.tuning.compare import random_batch
from lapclip.tuning.step_fits import CAPTION_TOKENS, ModelSize

SIZES = (ModelSize(128, 2), ModelSize(192, 6), ModelSize(384, 8), ModelSize(512, 12))
BATCHES = 16, 64, 256
SECONDS = 240.0  # for all sizes; what would take longer is left out
STEPS = 4  # of which the first is slower
STEPS_IN_ALL = 10  # of a size, alone and together


def compare_together(ranks: Ranks, progress: Status) -> dict[str, Any]:
    """Time every size of model and batch that memory and time allow, as the writer chooses."""
    device, _ = choose_device(AUTO)
    prepare_device(device, ranks.threads)
    ranks.start_steps(device, SECONDS)
    ends = time.perf_counter() + SECONDS
    cells: list[dict[str, Any]] = []
    for size in SIZES:
        for batch in BATCHES:
            if not ranks.broadcast_json(_fits(device, size, batch, cells, ends)):
                continue
            progress(
                f"{size.parameters / 1e6:.3g} M parameters, batch {batch}, {ranks.count} ranks"
            )
            cells.append(_time(device, ranks, size, batch))
    return {"machines": list(ranks.hosts), "cells": cells}


def _fits(
    device: Device, size: ModelSize, batch: int, cells: list[dict[str, Any]], ends: float
) -> bool:
    """Return whether this computer alone has the memory for a size, and whether there is time."""
    train = TrainConfig(batch_size=batch, steps=1)
    needed = predict_bytes(size.shape, train, CAPTION_TOKENS).total
    if needed > SHARE_OF_MEMORY * device.free_bytes():
        return False
    if not cells:
        return True
    expected = cells[-1]["alone_step_seconds"] * size.work(batch) / cells[-1]["work"]
    return STEPS_IN_ALL * expected < ends - time.perf_counter()


def _time(device: Device, ranks: Ranks, size: ModelSize, batch: int) -> dict[str, Any]:
    """Time steps of one size on the writer alone, then on all ranks."""
    kernels = Compute()  # the same on all machines
    train = TrainConfig(
        batch_size=batch,
        steps=1,
        device=device.kind,
        threads=ranks.threads,
        dtype="float32",
        compile="none",
        image_attention=kernels.attention,
        text_attention=kernels.attention,
        linear=kernels.linear,
    )
    step = make_step(CLIP(size.shape).to(device.torch), train, device)
    pairs = random_batch(size.shape, batch)
    alone = _step_seconds(step, pairs, device) if ranks.writes else 0.0
    alone = ranks.broadcast_json(alone)
    dealt = RankRows.deal(ranks.divide_rows(batch), ranks.rank)
    own = replace(
        pairs,
        pixels_BSSC=pairs.pixels_BSSC[dealt.own],
        positives_BB=pairs.positives_BB[dealt.own],
        ranks=dealt,
    )
    step.ranks = ranks
    together = ranks.broadcast_json(_step_seconds(step, own, device))
    return {
        "model": size.shape.name,
        "parameters": size.parameters,
        "batch": batch,
        "work": size.work(batch),
        "alone_step_seconds": alone,
        "step_seconds": together,
    }


def _step_seconds(step: TrainStep, batch: Batch, device: Device) -> float:
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step(batch, 1, 0.0, Stopwatch(device.synchronise, on=False))()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])

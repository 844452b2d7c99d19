"""Claims about training steps of the published model: their time, their memory, what loads them."""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.pixels import normalise
from lapclip.machine.choose_device import default_threads
from lapclip.measure.phases import PHASES
from lapclip.measure.timing import MIN_SPEEDUP, Timer
from lapclip.model.clip import CLIP
from lapclip.text import counted
from lapclip.training.checkpoint import Progress, save_checkpoint
from lapclip.training.objectives.contrastive import contrastive_loss
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.claims.finding import CannotMeasure, Finding, judge
from lapclip.tuning.claims.operations import measure_copy_rate
from lapclip.tuning.model_size import count_parameters
from lapclip.tuning.rehearsal import Rehearsal, make_workload, some_pairs
from lapclip.tuning.step_memory import StepMemory

SMALL_MACHINE_BYTES = 8e9  # memory of the machine that the claims come from


@dataclass(frozen=True)
class StepSpeed:
    """Seconds of the same step on the CPU and on the accelerator."""

    parameters: int
    batch: int
    cpu: float
    gpu: float

    @property
    def ratio(self) -> float:
        """How many times as fast the accelerator is."""
        return self.cpu / self.gpu

    @property
    def size(self) -> str:
        return f"{self.parameters / 1e6:.0f} M and batch {self.batch}"


def measure_published_step(bench: Bench) -> StepSpeed:
    """Time a step of the published model on both devices."""
    gpu_seconds = bench.time_step(bench.shape, bench.batch, bench.require_accelerator())
    return StepSpeed(count_parameters(bench.shape), bench.batch, bench.step_seconds, gpu_seconds)


def measure_larger_step(bench: Bench, batch: int | None = None) -> StepSpeed:
    """Time a step of a model above 100 M parameters on both devices."""
    accelerator = bench.require_accelerator()
    shape, batch = bench.larger_shape, batch or bench.batch
    cpu_seconds = bench.time_step(shape, batch, bench.cpu)
    gpu_seconds = bench.time_step(shape, batch, accelerator)
    return StepSpeed(count_parameters(shape), batch, cpu_seconds, gpu_seconds)


def judge_cpu_is_faster(step: StepSpeed) -> Finding:
    return judge(
        step.cpu * MIN_SPEEDUP < step.gpu,
        f"CPU {step.cpu * 1e3:.0f} ms, GPU {step.gpu * 1e3:.1f} ms: "
        f"the GPU is {step.ratio:.2f}x the CPU",
        f"one float32 step, {step.size}",
    )


def judge_larger_model(step: StepSpeed) -> Finding:
    return judge(
        1.5 <= step.ratio <= 2.0,
        f"{step.ratio:.2f}x the CPU",
        f"one float32 step, {step.size}",
    )


def measure_both_sides_of_thresholds(bench: Bench) -> tuple[StepSpeed, StepSpeed]:
    """Time one step below all three thresholds, and one above them."""
    below = measure_published_step(bench)
    return below, measure_larger_step(bench, bench.large_batch)


def judge_thresholds(steps: tuple[StepSpeed, StepSpeed]) -> Finding:
    below, above = steps
    return judge(
        below.cpu < below.gpu and above.gpu < above.cpu,
        f"GPU {below.ratio:.2f}x the CPU at {below.size}, {above.ratio:.2f}x at {above.size}",
        "the rule holds where the CPU wins below the thresholds and the GPU above them",
    )


# Half precision


def time_precisions(bench: Bench) -> dict[str, float]:
    """Return the seconds of a step of the published model by precision."""
    half_workload = make_workload(bench.shape, bench.batch, bench.cpu, "bfloat16")
    half = Rehearsal(half_workload, bench.cpu)
    timer = Timer(bench.cpu.synchronise, bench.rounds, max_seconds=10.0)
    timings = timer.time_in_turns(
        {"float32": bench.rehearsal.repeat_batch(), "bfloat16": half.repeat_batch()}
    )
    return {dtype: timing.median for dtype, timing in timings.items()}


def judge_half_precision(seconds: dict[str, float]) -> Finding:
    gain = seconds["float32"] / seconds["bfloat16"]
    return judge(
        gain < MIN_SPEEDUP,
        f"bfloat16 is {gain:.2f}x float32",
        f"float32 takes {seconds['float32']:.2f} s a step",
    )


# Phases and bandwidth

PUBLISHED_SHARES = dict(zip(PHASES, (0.015, 0.029, 0.0, 0.400, 0.513, 0.043), strict=True))
SHARE_TOLERANCE = 0.05


def measure_phases(bench: Bench) -> dict[str, float]:
    return bench.phases


def judge_phases(seconds: dict[str, float]) -> Finding:
    total = sum(seconds.values())
    shares = {phase: seconds[phase] / total for phase in PHASES}
    different = [
        phase for phase in PHASES if abs(shares[phase] - PUBLISHED_SHARES[phase]) > SHARE_TOLERANCE
    ]
    comparison = f"{', '.join(different)} differ by more" if different else "all agree"
    return judge(
        not different,
        ", ".join(f"{phase} {share:.1%}" for phase, share in shares.items())
        + f", of {total:.2f} s",
        f"shares within 5 points: {comparison}; a thread prepares batches: load is waiting for it",
    )


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second."""

    used: float
    available: float
    step_bytes: int


def measure_bandwidth(bench: Bench) -> Bandwidth:
    """Compare what a step reads and writes with what a copy reaches."""
    step_bytes = bench.memory.traffic
    return Bandwidth(step_bytes / bench.step_seconds, measure_copy_rate(bench), step_bytes)


def judge_bandwidth(bandwidth: Bandwidth) -> Finding:
    share = bandwidth.used / bandwidth.available
    return judge(
        share < 0.8,
        f"{bandwidth.used / 1e9:.1f} of {bandwidth.available / 1e9:.1f} GB/s ({share:.0%})",
        f"operations read and write {bandwidth.step_bytes / 1e9:.1f} GB a step, counted, "
        "caches left out; below 80 % holds",
    )


# Memory

PUBLISHED_BYTES = {"peak": 3.0e9, "parameters": 2.5e9, "gradients": 0.3e9, "optimizer": 0.1e9}


def measure_memory(bench: Bench) -> StepMemory:
    return bench.memory


def judge_memory(memory: StepMemory) -> Finding:
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.parts.items())
    different = [
        name
        for name, size in PUBLISHED_BYTES.items()
        if abs(getattr(memory, name) / size - 1) > 0.2
    ]
    comparison = ", ".join(different) or "nothing"
    return judge(
        not different,
        f"{memory.peak / 1e9:.2f} GB: {parts}",
        f"more than 20 % off: {comparison}; "
        "float32 parameters take 4 bytes each and Adam's averages 8",
    )


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint, and the parameters that are in it."""

    bytes: int
    parameters: int


def measure_checkpoint(bench: Bench) -> CheckpointSize:
    """Save a real checkpoint after a real step."""
    step = bench.rehearsal.step
    parameters = count_parameters(bench.shape)
    progress = Progress(step=bench.rehearsal.steps_taken)
    with tempfile.TemporaryDirectory(prefix="lapclip-claims-") as folder:
        path = save_checkpoint(Path(folder), step.model, step.optimizer, progress)
        assert path is not None
        size = sum(file.stat().st_size for file in path.iterdir())
    return CheckpointSize(size, parameters)


def judge_checkpoint(size: CheckpointSize) -> Finding:
    return judge(
        abs(size.bytes / 920e6 - 1) < 0.02,
        f"{size.bytes / 1e6:,.0f} MB, {size.bytes / size.parameters:.2f} bytes a parameter",
        f"a real checkpoint of {size.parameters:,} parameters; within 2 %",
    )


@dataclass(frozen=True)
class HalvedBatch:
    """What accumulating the gradients of two half batches would save and compute."""

    peak_bytes: int
    """Of a step with the whole batch."""
    cosine: float
    """Between the gradient of the batch and the mean of its halves' gradients."""


def measure_halved_batch(bench: Bench) -> HalvedBatch:
    return HalvedBatch(bench.memory.peak, compare_halves(bench))


def compare_halves(bench: Bench) -> float:
    """Return the cosine between the gradients of a batch and of its halves, in a small model."""
    workload = make_workload(bench.small_shape, bench.batch, bench.cpu)
    rehearsal = Rehearsal(workload, bench.cpu)
    model, batch = rehearsal.step.model, rehearsal.plan.batch(1)
    middle = bench.batch // 2
    whole = compute_gradient(model, batch, [slice(None)])
    halves = compute_gradient(model, batch, [slice(0, middle), slice(middle, None)])
    return torch.cosine_similarity(whole, halves, dim=0).item()


def compute_gradient(model: CLIP, batch: Batch, micro_batches: list[slice]) -> Tensor:
    """Return the mean gradient of the micro-batches, each with a loss of its own."""
    model.zero_grad(set_to_none=True)
    pixels = torch.from_numpy(batch.pixels_BSSC)
    tokens = torch.from_numpy(batch.tokens_BL)
    positives = torch.from_numpy(batch.positives_BB)
    for rows in micro_batches:
        images = model.encode_image(normalise(pixels[rows], model.shape))
        texts = model.encode_text(tokens[rows])
        loss, _ = contrastive_loss(images, texts, model.logit_scale.exp(), positives[rows, rows])
        (loss / len(micro_batches)).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def judge_accumulation(halved: HalvedBatch) -> Finding:
    return judge(
        halved.peak_bytes <= SMALL_MACHINE_BYTES,
        f"{halved.peak_bytes / 1e9:.2f} GB at batch 12, of 8 GB",
        "nor would it give more negatives: the gradients of two halves have a cosine of "
        f"{halved.cosine:.2f} with the batch's",
    )


# Threads, batches and loaders

CLAIMED_CORES = 8
CLAIMED_THREADS = 4  # torch's default there: the performance cores


def time_threads(bench: Bench) -> dict[int, float]:
    """Return the seconds of a step by the number of threads, in turns."""
    cores, default = os.cpu_count() or 1, default_threads()
    if (cores, default) != (CLAIMED_CORES, CLAIMED_THREADS):
        raise CannotMeasure(
            "it takes 4 performance and 4 efficiency cores; "
            f"here torch sees {cores} and uses {default}"
        )
    step = bench.rehearsal.repeat_batch()

    def step_with(threads: int) -> None:
        torch.set_num_threads(threads)
        step()

    runs = {str(threads): partial(step_with, threads) for threads in (1, 2, 4, 8)}
    timer = Timer(bench.cpu.synchronise, bench.rounds, min_rounds=bench.rounds)
    try:
        timings = timer.time_in_turns(runs)
    finally:
        torch.set_num_threads(default)
    return {int(threads): timing.median for threads, timing in timings.items()}


def judge_threads(seconds: dict[int, float]) -> Finding:
    return judge(
        seconds[8] <= min(seconds.values()) * MIN_SPEEDUP,
        ", ".join(f"{counted(count, 'thread')} {spent:.2f} s" for count, spent in seconds.items()),
        "intra-op threads alone; holds where 8 are within 3 % of the best",
    )


@dataclass(frozen=True)
class BatchSize:
    """One size of batch: its speed, and its memory."""

    pairs: int
    pairs_per_second: float
    peak_bytes: float


def measure_batch_sizes(bench: Bench) -> list[BatchSize]:
    """Time the same model with batches of several sizes, in turns."""
    peaks = {size: predict_peak(bench, size) for size in bench.batches}
    free = psutil.virtual_memory().available
    sizes = [size for size in bench.batches if peaks[size] < free]
    if bench.batch not in sizes or len(sizes) < 2:
        raise CannotMeasure(f"other batch sizes do not fit the {free / 1e9:.1f} GB of free memory")
    timer = Timer(bench.cpu.synchronise, bench.rounds, max_seconds=25.0, warm_up_rounds=0)
    timings = timer.time_in_turns({str(size): prepare_step(bench, size) for size in sizes})
    return [BatchSize(size, size / timings[str(size)].median, peaks[size]) for size in sizes]


def predict_peak(bench: Bench, batch: int) -> float:
    """Return the bytes at another batch size: only activations and the rest grow with it."""
    growing = bench.memory.activations + bench.memory.rest
    return bench.memory.peak + growing * (batch / bench.batch - 1)


def prepare_step(bench: Bench, size: int) -> Callable[[], object]:
    """Return a step of the published model on a batch of this size."""
    plan = bench.rehearsal.plan
    pairs = some_pairs(max(len(plan.pairs), size), bench.shape.image_size)
    batch = BatchPlan(pairs, plan.tokenizer, plan.context, size, seed=0).batch(1)
    return lambda: bench.rehearsal.step_once(batch)


def judge_batch_sizes(sizes: list[BatchSize]) -> Finding:
    fitting = [size for size in sizes if size.peak_bytes <= SMALL_MACHINE_BYTES]
    fastest = max(fitting, key=lambda size: size.pairs_per_second)
    claimed = next(size for size in fitting if size.pairs == 12)
    figures = [
        f"{size.pairs}: {size.pairs_per_second:.2f} pairs/s, {size.peak_bytes / 1e9:.1f} GB"
        for size in sizes
    ]
    return judge(
        claimed.pairs_per_second * MIN_SPEEDUP >= fastest.pairs_per_second,
        ", ".join(figures),
        f"by speed within 8 GB; the fastest tried is {fastest.pairs}; "
        "memory beyond 12 is predicted from its parts",
    )


WORKERS = 4
PREFETCHED_BATCHES = 2  # per worker, as published


class PlannedBatches(Dataset):
    """The batches of a plan for torch's DataLoader, one per index."""

    def __init__(self, plan: BatchPlan, count: int) -> None:
        self.plan, self.count = plan, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return self.plan.batch(index + 1)


def time_loading(rehearsal: Rehearsal, workers: int, steps: int) -> float:
    """Return the seconds from one update to the next, with batches from torch's DataLoader.

    Without workers, the training itself makes the batches.
    """
    options: dict[str, Any] = {}
    if workers:
        options = {"persistent_workers": True, "prefetch_factor": PREFETCHED_BATCHES}
    batches = PlannedBatches(rehearsal.plan, steps + 1)
    with warnings.catch_warnings():  # the claim asks for more workers than there may be cores
        warnings.simplefilter("ignore", UserWarning)
        loader = iter(DataLoader(batches, batch_size=None, num_workers=workers, **options))
    clock = Timer().clock
    moments = []
    for batch in loader:
        rehearsal.step_once(batch)
        moments.append(clock())
    return statistics.median(end - start for start, end in pairwise(moments))


def measure_loading(bench: Bench) -> tuple[float, float]:
    """Return the seconds of steps with batches made in line, and by worker processes."""
    in_line = time_loading(bench.rehearsal, 0, bench.rounds)
    return in_line, time_loading(bench.rehearsal, WORKERS, bench.rounds)


def judge_workers(seconds: tuple[float, float]) -> Finding:
    in_line, by_workers = seconds
    return judge(
        in_line > by_workers * MIN_SPEEDUP,
        f"{in_line / by_workers:.2f}x loading in line "
        f"({by_workers:.2f} s a step against {in_line:.2f} s)",
        f"{WORKERS} workers",
    )

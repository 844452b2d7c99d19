"""Claims that are measured here, counted, or decided by the notes' own numbers: each function takes the bench and gives
back a finding. Those about an accelerator cannot be measured without one, and nothing stands in for it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from lapclip.claims import judge
from lapclip.claims.judge import Finding, judged, unknown
from lapclip.config import ModelConfig
from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.pixels import normalise
from lapclip.errors import LapclipError, first_line
from lapclip.evaluation.retrieval import batch_accuracy
from lapclip.loss import contrastive_loss
from lapclip.machine.choose_device import choose_device, default_threads
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.measure.timing import Timer
from lapclip.microscope import device_speed, step_phases
from lapclip.microscope.device_speed import (
    copy_rates,
    layout_times,
    many_products,
    product_parts,
    transfer_times,
)
from lapclip.microscope.step_phases import (
    WORKERS,
    BatchPhases,
    loader_times,
    precisions,
    step_seconds,
    thread_times,
)
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.shapes import SHAPES
from lapclip.seeding import generator
from lapclip.training.checkpoint import Progress, save_checkpoint
from lapclip.tuning.measure import Rehearsal, Workload, make_workload, some_pairs
from lapclip.tuning.memory_probe import StepMemory, step_memory


@dataclass
class Bench:
    """The sizes to measure at; those of the published run, unless a test makes them smaller."""

    shape: ModelConfig = SHAPES["seed"]
    larger: ModelConfig = SHAPES["vit-b-32"]
    small: ModelConfig = SHAPES["tiny"]
    """For losses over many steps."""
    batch: int = 12
    batches: tuple[int, ...] = (8, 12, 16, 24)
    turns: int = 2
    loss_steps: int = 50
    copy_bytes: int = 1 << 28
    product_size: int = device_speed.SIZE
    cpu: Device = field(default_factory=lambda: Cpu())
    accelerator: Device | None = field(default_factory=lambda: _accelerator())

    @cached_property
    def workload(self) -> Workload:
        """The published model at its batch, float32 on the CPU."""
        return make_workload(self.shape, self.batch, self.cpu)

    @cached_property
    def memory(self) -> StepMemory:
        self._check_room()
        return step_memory(self.workload, self.cpu)

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The published model in training on the CPU."""
        self._check_room()
        return Rehearsal(self.workload, self.cpu, pairs=4 * self.batch)

    @cached_property
    def phases(self) -> BatchPhases:
        return step_phases.batch_phases(self.rehearsal, self.turns)

    def seconds(self, shape: ModelConfig, batch: int, device: Device) -> float:
        """A step of some model on some device, sent there in the fastest known way."""
        rehearsal = Rehearsal(make_workload(shape, batch, device, compile="auto"), device)
        return step_seconds(
            rehearsal.repeated(), device, self.turns + 1, warm_up=1 if device.is_cpu else 5
        )

    def _check_room(self) -> None:
        """Twelve bytes a parameter and the gradients, and about as much again for activations at this batch."""
        needed, free = 40 * parameters(self.shape), psutil.virtual_memory().available
        if needed > free:
            raise LapclipError(
                f"it takes about {needed / 1e9:.1f} GB of free memory; there are {free / 1e9:.1f} GB"
            )


def parameters(shape: ModelConfig) -> int:
    """How many parameters a model has."""
    with torch.device("meta"):
        return count_parameters(CLIP(shape))


def _accelerator() -> Device | None:
    device, _ = choose_device("auto")
    return None if device.is_cpu else device


def half_precision(bench: Bench) -> Finding:
    """Claim 6: the real step in bfloat16; float16, which few processors know, and losses on a small model."""
    if not bench.rehearsal.taken:
        bench.rehearsal()
    half = Rehearsal(make_workload(bench.shape, bench.batch, bench.cpu, "bfloat16"), bench.cpu)
    half()
    runs = {"float32": bench.rehearsal.repeated(), "bfloat16": half.repeated()}
    timer = Timer(bench.cpu.synchronise, bench.turns, max_seconds=10.0, warm_up_rounds=0)
    step = {name: timing.median for name, timing in timer.time_in_turns(runs).items()}
    small = precisions(bench.small, bench.batch, bench.cpu, bench.loss_steps)
    good = {name: one for name, one in small.items() if one.error is None}
    return judge.half_precision(
        step,
        {name: one.seconds for name, one in good.items()},
        {name: one.spikes for name, one in good.items()},
    )


def batch_phases(bench: Bench) -> Finding:
    """Claim 7."""
    return judge.batch_shares(bench.phases.shares, bench.phases.total)


def peak_memory(bench: Bench) -> Finding:
    """Claim 8."""
    return judge.peak_memory(bench.memory)


def checkpoint_size(bench: Bench) -> Finding:
    """Claim 9: a real checkpoint after a real step."""
    if not bench.rehearsal.taken:
        bench.rehearsal()
    model, step = bench.rehearsal.step.model, bench.rehearsal.step
    count = count_parameters(model)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < 16 * count:
        return unknown(
            f"a checkpoint takes {12 * count / 1e6:,.0f} MB and {free / 1e6:,.0f} MB of disk are free"
        )
    with tempfile.TemporaryDirectory(prefix="lapclip-claims-") as folder:
        path = save_checkpoint(
            Path(folder), model, step.optimizer, Progress(step=bench.rehearsal.taken)
        )
        size = sum(file.stat().st_size for file in path.iterdir())
    return judge.checkpoint_size(size, count)


def best_threads(bench: Bench) -> Finding:
    """Claim 10."""
    cores, performance = os.cpu_count() or 1, default_threads()
    if (cores, performance) != judge.CLAIMED_CORES:
        return judge.other_cores(cores, performance)
    times = thread_times(bench.rehearsal, [4, 8, 2, 1], rounds=bench.turns)
    return judge.best_threads(times.seconds)


def loader_workers(bench: Bench) -> Finding:
    """Claim 11: real training with batches made in line, and by worker processes."""
    times = loader_times(
        bench.rehearsal, steps=bench.turns, workers=(0, WORKERS), rounds=1, own=False
    )
    workers = times[f"{WORKERS} workers"]
    return judge.workers_pay(times["in line"].seconds, workers.seconds, workers.start_seconds)


def best_batch(bench: Bench) -> Finding:
    """Claim 12: the same model fed batches of several sizes, in turns."""
    peaks = {size: predicted_peak(bench, size) for size in bench.batches}
    free = psutil.virtual_memory().available
    runs = {str(size): _step_of(bench, size) for size in bench.batches if peaks[size] < free}
    if str(bench.batch) not in runs or len(runs) < 2:
        return unknown(f"other batch sizes do not fit the {free / 1e9:.1f} GB of free memory")
    if not bench.rehearsal.taken:
        bench.rehearsal()
    timer = Timer(bench.cpu.synchronise, bench.turns, max_seconds=25.0, warm_up_rounds=0)
    timings = timer.time_in_turns(runs)
    rates = {int(size): int(size) / timing.median for size, timing in timings.items()}
    return judge.best_batch(rates, peaks)


def predicted_peak(bench: Bench, size: int) -> float:
    """Bytes at another batch size: activations and the rest grow with it, weights and what hangs on them do not."""
    grows = bench.memory.activations + bench.memory.rest
    return bench.memory.peak + grows * (size / bench.batch - 1)


def _step_of(bench: Bench, size: int) -> Callable[[], object]:
    plan = bench.rehearsal.plan
    pairs = some_pairs(max(len(plan.pairs), size), bench.shape.image_size)
    batch = BatchPlan(pairs, plan.tokenizer, plan.context, size, seed=0).batch(1)
    return lambda: bench.rehearsal(batch)


def memory_bandwidth(bench: Bench) -> Finding:
    """Claim 16."""
    available = copy_rates(bench.cpu, bench.copy_bytes).memory
    return judge.bandwidth(bench.memory.traffic, bench.phases.total, available)


def attention_mask(bench: Bench) -> Finding:
    """Claim 21: a causal mask made both ways, scripted and compiled, against the plain computation."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 16, 8, generator=draw) for _ in range(3))
    right = _masked_attention(query, key, value)
    faults, tried = [], []
    makers = {
        "scripting": lambda form: torch.jit.script(form),
        "compiling": lambda form: torch.compile(form),
    }
    for how, make in makers.items():
        for mask, form in (("a .bool() mask", _cast_attention), ("a bool mask", _masked_attention)):
            fault = _fault(lambda make=make, form=form: make(form)(query, key, value), right)
            if (
                how == "compiling"
                and fault is not None
                and _fault(lambda: torch.compile(torch.neg)(query), -query)
            ):
                continue  # nothing can be compiled here, so this says nothing of masks
            tried.append(f"{how} {mask}")
            faults += [f"{how} {mask}: {fault}"] if fault else []
    working = [name for name in tried if not any(fault.startswith(f"{name}:") for fault in faults)]
    return judged(
        any(".bool()" in fault for fault in faults),
        "; ".join([*faults, f"works: {', '.join(working) or 'nothing'}"]),
        f"torch {torch.__version__}; to work is to give what the plain computation gives",
    )


def _masked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1))
    mask = torch.triu(torch.ones(scores.shape[-2], scores.shape[-1], dtype=torch.bool), diagonal=1)
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ value


def _cast_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1))
    mask = torch.triu(torch.ones(scores.shape[-2], scores.shape[-1]), diagonal=1).bool()
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ value


def _fault(run: Callable[[], Tensor], right: Tensor) -> str | None:
    """What is wrong with a computation, if anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # scripting is on its way out of torch
            return None if torch.allclose(run(), right, atol=1e-5) else "another result"
    except Exception as error:  # compilers fail in many ways
        return f"{type(error).__name__}: {first_line(error, 80)}"


def numpy_two(bench: Bench) -> Finding:
    """Claim 22: numbers there and back, and the sharing of memory that training relies on."""
    if int(np.__version__.split(".")[0]) < 2:
        return unknown(f"NumPy {np.__version__} is installed, not 2 or later")
    fault = None
    try:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        tensor = torch.from_numpy(array)
        tensor.mul_(2)
        if not (
            np.array_equal(array, [[0, 2, 4], [6, 8, 10]]) and np.array_equal(tensor.numpy(), array)
        ):
            fault = "numbers differ on the way"
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    versions = f"NumPy {np.__version__} with torch {torch.__version__}"
    return judged(
        fault is not None,
        f"{versions}: {fault or 'arrays go both ways'}",
        "true of torch before 2.3",
    )


def accumulation(bench: Bench) -> Finding:
    """Claim 23: the memory of a whole batch, and what accumulating two halves would compute instead."""
    return judge.accumulation(bench.memory.peak, halves_cosine(bench))


def halves_cosine(bench: Bench) -> float:
    """Cosine between the gradient of a batch and the mean of its halves' gradients, in a small model."""
    rehearsal = Rehearsal(make_workload(bench.small, bench.batch, bench.cpu), bench.cpu)
    model, batch = rehearsal.step.model, rehearsal.plan.batch(1)
    halves = [slice(0, bench.batch // 2), slice(bench.batch // 2, None)]
    whole = _gradient(model, batch, [slice(None)])
    return torch.cosine_similarity(whole, _gradient(model, batch, halves), dim=0).item()


def _gradient(model: CLIP, batch: Batch, micro_batches: list[slice]) -> Tensor:
    model.zero_grad(set_to_none=True)
    pixels, tokens, positives = (
        torch.from_numpy(array)
        for array in (batch.pixels_BSSC, batch.tokens_BL, batch.positives_BB)
    )
    for rows in micro_batches:
        image, text = (
            model.encode_image(normalise(pixels[rows], model.shape)),
            model.encode_text(tokens[rows]),
        )
        loss, _ = contrastive_loss(image, text, model.logit_scale.exp(), positives[rows, rows])
        (loss / len(micro_batches)).backward()
    return torch.cat(
        [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    )


def contiguous(bench: Bench) -> Finding:
    """Claim 30: a block of the image tower at its real sizes."""
    shape = bench.shape
    tokens = 1 + (shape.image_size // shape.patch) ** 2
    times = layout_times(
        bench.cpu, bench.batch, tokens, shape.image_width, shape.image_heads, 3 * bench.turns
    )
    return judge.contiguous(times.contiguous_ms, times.permuted_ms)


ABSENT = "torch finds no accelerator here"
LARGE_BATCH = 32


def one_product(bench: Bench) -> Finding:
    """Claim 1. Without an accelerator the CPU's time is given with the reason, and decides nothing."""
    cpu = product_parts(bench.cpu, bench.product_size)
    if bench.accelerator is None:
        return unknown(f"{ABSENT}; the CPU takes {cpu.total_ms:.3f} ms, {cpu.gflops:,.0f} GFLOP/s")
    return judge.one_product(cpu, product_parts(bench.accelerator, bench.product_size))


def hundred_products(bench: Bench) -> Finding:
    """Claim 2."""
    cpu = many_products(bench.cpu, bench.product_size)
    if bench.accelerator is None:
        return unknown(f"{ABSENT}; the CPU takes {cpu.seconds:.3f} s, {cpu.gflops:,.0f} GFLOP/s")
    return judge.hundred_products(cpu, many_products(bench.accelerator, bench.product_size))


def cpu_trains_faster(bench: Bench) -> Finding:
    """Claim 3: a step of the published model."""
    if bench.accelerator is None:
        return unknown(ABSENT)
    return judge.cpu_trains_faster(
        bench.phases.total,
        bench.seconds(bench.shape, bench.batch, bench.accelerator),
        parameters(bench.shape),
        bench.batch,
    )


def three_thresholds(bench: Bench) -> Finding:
    """Claim 4: one step below all three thresholds, one above them."""
    if bench.accelerator is None:
        return unknown(ABSENT)
    below = (bench.phases.total, bench.seconds(bench.shape, bench.batch, bench.accelerator))
    above = _both(bench, bench.accelerator, LARGE_BATCH)
    sizes = tuple(
        f"{parameters(shape) / 1e6:.0f} M and batch {batch}"
        for shape, batch in ((bench.shape, bench.batch), (bench.larger, LARGE_BATCH))
    )
    return judge.three_thresholds(below, above, (sizes[0], sizes[1]))


def free_transfers(bench: Bench) -> Finding:
    """Claim 5."""
    if bench.accelerator is None:
        return unknown(f"{ABSENT}, so nothing is transferred")
    times = transfer_times(bench.accelerator, bench.batch, bench.shape.image_size)
    return judge.free_transfers(times, bench.accelerator.shares_memory)


def larger_models(bench: Bench) -> Finding:
    """Claim 25: a step of a model above 100 M."""
    if bench.accelerator is None:
        return unknown(ABSENT)
    return judge.larger_models(
        *_both(bench, bench.accelerator, bench.batch), parameters(bench.larger)
    )


def pinning(bench: Bench) -> Finding:
    """Claim 26."""
    if bench.accelerator is None:
        return unknown(f"{ABSENT}, so there is nothing to pin memory for")
    return judge.pinning(transfer_times(bench.accelerator, bench.batch, bench.shape.image_size))


def _both(bench: Bench, accelerator: Device, batch: int) -> tuple[float, float]:
    """Seconds of a step of the larger model on the CPU and on the accelerator."""
    cpu, other = (bench.seconds(bench.larger, batch, device) for device in (bench.cpu, accelerator))
    return cpu, other


BATTERY_WH = 58.2
"""A 13-inch MacBook Pro with an M1 (the technical specifications by Apple: 58.2-watt-hour battery)."""
M1_CORES = (4, 4)
"""Performance and efficiency cores of an M1 (the same page)."""


def parameter_count(bench: Bench) -> Finding:
    """Claim 19: the architecture as it is written, and the one that has that many."""
    return count_verdict(parameters(SHAPES["seed-as-written"]), parameters(SHAPES["seed"]))


def count_verdict(written: int, other: int) -> Finding:
    return judged(
        abs(written / 76.7e6 - 1) < 0.005,
        f"{written:,} as written",
        f"counted in the built model; 512 wide and 12 deep in both towers has {other:,}",
    )


def chance(bench: Bench) -> Finding:
    """Claim 20: the score of embeddings that know nothing, in batches of the published run's size."""
    return chance_verdict(random_accuracy(bench.batch), bench.batch)


def random_accuracy(size: int, pairs: int = 1200) -> float:
    """Accuracy of random unit vectors in batches of `size`."""
    draw = generator(0, "chance")
    image, text = (draw.normal(size=(pairs, 32)).astype(np.float32) for _ in range(2))
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (image, text)]
    return batch_accuracy(unit[0], unit[1], size, repeats=20)["accuracy"]


def chance_verdict(accuracy: float, size: int) -> Finding:
    return judged(
        abs(accuracy - 0.06) < 0.01,
        f"{accuracy:.1%} for random vectors in batches of {size}",
        f"1/{size} is {1 / size:.1%}; 1/16 belongs to batches of 16",
    )


def loss_slope(bench: Bench) -> Finding:
    """Claim 27: the slopes the notes state against the losses the notes list."""
    return slope_verdict(first=3.25, fifth=2.75, early=0.25, later=0.12)


def slope_verdict(first: float, fifth: float, early: float, later: float) -> Finding:
    """Two epochs at the early slope and two at the later one lead from epoch 1 to epoch 5."""
    needed, listed = 2 * early + 2 * later, first - fifth
    return judged(
        abs(needed - listed) < 0.1 * listed,
        f"{listed / 4:.3f} an epoch from epoch 1 to 5, by the notes' own table",
        f"the stated slopes mean a fall of {needed:.2f} from epoch 1 to 5; the table says {listed:.2f}",
    )


def battery(bench: Bench) -> Finding:
    """Claim 28."""
    return battery_verdict(watts=35.0, hours=0.65, capacity=BATTERY_WH)


def battery_verdict(watts: float, hours: float, capacity: float) -> Finding:
    share = watts * hours / capacity
    return judged(
        abs(share - 0.15) < 0.03,
        f"{share:.0%} ({watts * hours:.1f} of {capacity:g} Wh)",
        "the notes' own watts and hours against the battery of that machine",
    )


def performance_cores(bench: Bench) -> Finding:
    """Claim 29."""
    return cores_verdict(*M1_CORES)


def cores_verdict(performance: int, efficiency: int) -> Finding:
    return judged(
        performance == 8,
        f"{performance} performance and {efficiency} efficiency cores",
        "the maker's figures, and the notes' own table of cores",
    )

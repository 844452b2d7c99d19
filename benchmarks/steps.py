"""Our training step against OpenCLIP's: the same model, weights, batch and precision, in one run, in turns.

    make bench                                                   # CPU rows
    python benchmarks/steps.py --device cuda [--rows vit-b-16]   # on an accelerator, from source alone
    python benchmarks/steps.py --apart                           # the peer in a process of its own, set up by nobody
    python benchmarks/steps.py --profile [--rows mini]           # where our step goes; needs no peer

Rounds are interleaved (ours, peer, ours, peer, ...), so that a machine that drifts drifts for both; medians are shown.
Both sides get the same pixels and the same ids; the peer's captions are padded to 77, because that is what it does.
Both sides share a process, so the peer gains from how we set up memory; with `--apart` (on the CPU) it has a process of
its own with torch's defaults, as somebody who trains with it has. Before timing, both sides must give the same loss in
float32 to 1e-4. The peer has fused AdamW, the same threads and, in
bfloat16, the faster of amp_bf16 and pure_bf16; on an accelerator the faster of eager and compiled. Our kernels are
timed anew, as `lapclip train` does; on an accelerator our step is compiled too (`train.compile=compiled-graph`).
`of_limit` is the arithmetic of our step (`lapclip.tuning.model_size` says how it is counted) at the best rate that a
product of its widths reaches here, divided by the time it took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.data.pixels import normalise
from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
from lapclip.machine.device import DTYPES, Device
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
from lapclip.training.step import TrainStep
from lapclip.tuning.kernels import choose_kernels
from lapclip.tuning.model_size import count_operations, measure_product_rate


@dataclass(frozen=True)
class Row:
    """One comparison."""

    model: str
    dtype: str
    batch: int
    caption_tokens: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dtype}-{self.batch}"


CPU_ROWS = [
    Row("seed", "float32", 12, 40),
    Row("seed", "bfloat16", 12, 40),
    Row("vit-b-32", "float32", 32, 24),
    Row("mini", "float32", 128, 64),
    Row("mini", "bfloat16", 128, 64),
]
ACCELERATOR_ROWS = [
    Row("seed", "bfloat16", 12, 40),
    Row("seed", "bfloat16", 256, 64),
    Row("vit-b-16", "bfloat16", 1024, 24),
    Row("vit-b-32", "bfloat16", 1024, 24),
    Row("mini", "bfloat16", 128, 64),
]


LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""The variable by which torch asks Linux for large pages; importing lapclip sets it."""
FEWEST_WARM_UP, WARM_UP_SECONDS = 3, 5.0
"""Steps before a profile, and the seconds that they take at least."""
KERNEL_KINDS = {
    "copies": r"memcpy|memset",
    "attention": r"attention|fmha|flash|cudnn_generated|sdpa",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|_mm_",
    "GELU": r"gelu",
    "norms": r"norm",
    "optimiser": r"multi_tensor|adam",
}
"""Kinds of kernels on an accelerator, and what their names have; the first that fits counts."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", nargs="*", default=[], help="parts of row names, such as seed-bfloat16"
    )
    parser.add_argument(
        "--peer", nargs="*", help="only these of the peer's ways, such as 'pure_bf16 compiled'"
    )
    parser.add_argument(
        "--apart", action="store_true", help="the peer in a process of its own (CPU)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="only say which operations our step spends its time in",
    )
    options = parser.parse_args()
    device, _ = choose_device(options.device)
    prepare_device(device, default_threads())
    rows = CPU_ROWS if device.is_cpu else ACCELERATOR_ROWS
    if options.apart and not device.is_cpu:
        parser.error("--apart is for the CPU")
    chosen = [
        row for row in rows if not options.rows or any(part in row.name for part in options.rows)
    ]
    if not chosen:
        parser.error(f"no such row; there are {', '.join(row.name for row in rows)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAPCLIP_CACHE"] = (
            folder  # kernels are chosen in this run, not remembered from another
        )
        if options.profile:
            for row in chosen:
                print_profile(row, device, options.rounds)
            return
        found = [
            compare(row, device, options.rounds, options.peer, apart=options.apart)
            for row in chosen
        ]
    print(json.dumps({"rows": found}))


def compare(
    row: Row, device: Device, rounds: int, ways: list[str] | None = None, *, apart: bool = False
) -> dict:
    """Time a row and say how it went."""
    from openclip import NAME, PeerStep

    shape = SHAPES[row.model]
    batch = random_batch(row)
    rows = row.batch * row.caption_tokens
    rates = [measure_product_rate(shape, rows, device, DTYPES[row.dtype])]
    ours = our_step(row, device)
    check_same_loss(row, batch, device)
    place = device.torch
    pixels, padded = peers_inputs(row, batch, place)
    off = Stopwatch(device.synchronise, on=False)
    sides: dict[str, Callable[[], Callable[[], object]]] = {"ours": sending(ours, batch, off)}
    for precision in ["float32"] if row.dtype == "float32" else ["amp_bf16", "pure_bf16"]:
        for compiled in (False,) if device.is_cpu else (False, True):
            name = f"{precision}{' compiled' if compiled else ''}"
            if ways and name not in ways:
                continue
            if apart:
                sides[f"{name}, apart"] = PeerApart(row, precision)
                continue
            step = PeerStep(CLIP(shape), precision, place, compiled=compiled)
            sides[name] = lambda step=step: step(pixels, padded).item
    times = interleave(sides, device, rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours_seconds = medians.pop("ours")
    peer_name, peer_seconds = min(medians.items(), key=lambda item: item[1])
    # Rates before and after: the limit is to hold for the machine at its best in this run.
    rates.append(measure_product_rate(shape, rows, device, DTYPES[row.dtype]))
    limit = count_operations(shape, row.batch, row.caption_tokens) / max(rates)
    spreads = [
        (max(times[side]) - min(times[side])) / statistics.median(times[side])
        for side in ("ours", peer_name)
    ]
    print(
        f"train step, {row.model}, batch {row.batch}, captions of {row.caption_tokens}, {row.dtype}, {device.kind}: "
        f"{peer_seconds / ours_seconds:.2f}x {NAME} ({peer_name}); {ours_seconds * 1e3:.1f} ms against "
        f"{peer_seconds * 1e3:.1f} ms, {limit / ours_seconds:.0%} of the limit "
        f"(median of {rounds}, spreads {spreads[0]:.0%} and {spreads[1]:.0%})",
        flush=True,
    )
    return {
        "model": row.model,
        "device": device.kind,
        "dtype": row.dtype,
        "batch": row.batch,
        "caption_tokens": row.caption_tokens,
        "ours_ms": ours_seconds * 1e3,
        "peer": NAME,
        "peer_ms": peer_seconds * 1e3,
        "peer_settings": peer_name,
        "ratio": peer_seconds / ours_seconds,
        "limit_ms": limit * 1e3,
        "of_limit": limit / ours_seconds,
    }


def print_profile(row: Row, device: Device, steps: int) -> None:
    """Which operations our step spends its time in, by their own time; on an accelerator, which kinds of kernels.

    Operations that others call count apart. A step on an accelerator is compiled but not recorded: a recording is one
    operation, and replays the same kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    changes = {} if device.is_cpu else {"compile": "compiled"}
    step, off = our_step(row, device, **changes), Stopwatch(device.synchronise, on=False)
    take = sending(step, random_batch(row), off)
    # Memory that a step takes for the first time is slow, and it is a few steps until none of it is.
    began = time.perf_counter()
    for taken in itertools.count(1):
        take()()
        if taken >= FEWEST_WARM_UP and time.perf_counter() - began > WARM_UP_SECONDS:
            break
    activity = ProfilerActivity.CPU if device.is_cpu else ProfilerActivity.CUDA
    own_time = "self_cpu_time_total" if device.is_cpu else "self_device_time_total"
    spent: dict[str, float] = {}
    seconds = 0.0
    for _ in range(steps):
        take()()
        device.synchronise()
        # What the profiler keeps of a step lies between the tensors' blocks of memory, so that the next step would have
        # to take new ones, which is slow: each profile is of one step.
        with profile(activities=[activity]) as found:
            began = time.perf_counter()
            take()()
            device.synchronise()
            seconds += time.perf_counter() - began
        for entry in found.key_averages():
            spent[entry.key] = spent.get(entry.key, 0.0) + getattr(entry, own_time)
    whole = sum(spent.values())
    head = f"{row.name}, {seconds / steps * 1e3:.1f} ms a step with the profiler"
    if not device.is_cpu:
        kinds: dict[str, float] = {}
        for name, microseconds in spent.items():
            kind = next(
                (
                    kind
                    for kind, part in KERNEL_KINDS.items()
                    if re.search(part, name, re.IGNORECASE)
                ),
                "other",
            )
            kinds[kind] = kinds.get(kind, 0) + microseconds
        each = "; ".join(f"{kind} {kinds[kind] / steps / 1e3:.1f} ms" for kind in most_first(kinds))
        print(f"{head}, kernels {whole / steps / 1e3:.1f} ms: {each}", flush=True)
        head = "  the longest"
    shares = "; ".join(f"{name[:90]} {spent[name] / whole:.1%}" for name in most_first(spent)[:12])
    print(f"{head}: {shares}", flush=True)


def most_first(spent: dict[str, float]) -> list[str]:
    """The names, from the one with the largest value on."""
    return sorted(spent, key=lambda name: -spent[name])


def peers_inputs(row: Row, batch: Batch, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels as floats, and captions padded to the context."""
    shape = SHAPES[row.model]
    pixels = normalise(torch.from_numpy(batch.pixels_BSSC).to(place), shape).contiguous()
    tokens = torch.from_numpy(batch.tokens_BL).to(place)
    return pixels, torch.nn.functional.pad(tokens, (0, shape.context - tokens.shape[1]), value=0)


class PeerApart:
    """The peer's step in a process of its own. It rests while the other side has its turn."""

    def __init__(self, row: Row, precision: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        asked = os.environ.pop(LARGE_PAGES, None)
        os.environ[LARGE_PAGES] = (
            "0"  # torch's default; importing lapclip would ask for them there too
        )
        try:
            context.Process(target=take_steps, args=(there, row, precision), daemon=True).start()
        finally:
            os.environ.pop(LARGE_PAGES)
            if asked is not None:
                os.environ[LARGE_PAGES] = asked
        self._here.recv()

    def __call__(self) -> Callable[[], object]:
        self._here.send("step")
        return self._here.recv


def take_steps(told: Connection, row: Row, precision: str) -> None:
    """Take a step whenever told to, and give back its loss."""
    from openclip import PeerStep

    torch.set_num_threads(default_threads())
    pixels, padded = peers_inputs(row, random_batch(row), torch.device("cpu"))
    step = PeerStep(CLIP(SHAPES[row.model]), precision, torch.device("cpu"))
    told.send("ready")
    while told.recv():
        told.send(step(pixels, padded).item())


def interleave(
    sides: dict[str, Callable[[], Callable[[], object]]], device: Device, rounds: int
) -> dict[str, list[float]]:
    """Seconds a step of each side, taken in turns after a warm-up of each."""
    for run in sides.values():
        for _ in range(2 if device.is_cpu else 5):
            run()()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(take_turn(run, device))
    return times


def take_turn(run: Callable[[], Callable[[], object]], device: Device) -> float:
    """Seconds a step of a turn: one step on the CPU; on an accelerator ten, after one that is not timed because memory
    changes hands there, with the loss read at the end, as a trainer reads it while the next step runs."""
    steps = 1 if device.is_cpu else 10
    if not device.is_cpu:
        run()()
    device.synchronise()
    began = time.perf_counter()
    for _ in range(steps - 1):
        run()
    run()()
    device.synchronise()
    return (time.perf_counter() - began) / steps


def our_step(row: Row, device: Device, **changes) -> TrainStep:
    """Our step with its kernels chosen as `lapclip train` chooses them; on an accelerator also compiled."""
    how = "none"
    if device.records_graphs:
        # A recording keeps its memory to itself, and at 1,024 pairs the peer would find too little left.
        how = "compiled-graph" if row.batch < 1024 else "compiled"
    settings = {
        "dtype": row.dtype,
        "batch_size": row.batch,
        "weight_decay": 0.2,
        "compile": how,
        **changes,
    }
    shape, train = SHAPES[row.model], TrainConfig(**settings)
    choices, _ = choose_kernels(shape, train, row.caption_tokens, device)
    return make_step(CLIP(shape).to(device.torch), replace(train, **choices), device)


def sending(step: TrainStep, batch: Batch, off: Stopwatch) -> Callable[[], Callable[[], object]]:
    """Takes a step; where batches are sent ahead, the next one travels meanwhile."""
    if not step.sends_ahead:
        return lambda: step(batch, 1, 1e-5, off)
    sender = ThreadPoolExecutor(1)
    coming = [sender.submit(step.send, batch, 1)]

    def take() -> Callable[[], object]:
        coming.append(sender.submit(step.send, batch, 1))
        return step(coming.pop(0).result(), 1, 1e-5, off)

    return take


def check_same_loss(row: Row, batch: Batch, device: Device) -> None:
    """The same weights in both sides give the same loss in float32, to 1e-4."""
    from openclip import PeerStep

    few = Batch(
        batch.pixels_BSSC[:12],
        batch.tokens_BL[:12],
        batch.positives_BB[:12, :12],
        batch.sided_B[:12],
    )
    shape = SHAPES[row.model]
    ours = our_step(row, device, dtype="float32", compile="none")
    mine = ours(few, 1, 0.0, Stopwatch(device.synchronise, on=False))().loss
    pixels = normalise(torch.from_numpy(few.pixels_BSSC).to(device.torch), shape)
    tokens = torch.nn.functional.pad(
        torch.from_numpy(few.tokens_BL), (0, shape.context - row.caption_tokens)
    )
    theirs = PeerStep(CLIP(shape), "float32", device.torch)(pixels, tokens.to(device.torch)).item()
    assert abs(mine - theirs) < 1e-4, f"{row.name}: losses differ, ours {mine}, the peer's {theirs}"
    timed = our_step(row, device, compile="none")(
        few, 1, 0.0, Stopwatch(device.synchronise, on=False)
    )().loss
    assert abs(timed - theirs) < 0.02 * theirs, (
        f"{row.name}: in {row.dtype} the loss is {timed}, not near {theirs}"
    )


def random_batch(row: Row) -> Batch:
    """Random images and captions of exactly that many tokens, start and end included."""
    shape, draw = SHAPES[row.model], np.random.default_rng(0)
    tokens = draw.integers(1, shape.vocabulary - 2, (row.batch, row.caption_tokens))
    tokens[:, -1] = shape.vocabulary - 1
    pixels = draw.integers(
        0, 256, (row.batch, shape.image_size, shape.image_size, 3), dtype=np.uint8
    )
    return Batch(pixels, tokens, np.eye(row.batch, dtype=bool), np.zeros(row.batch, dtype=bool))


if __name__ == "__main__":
    main()

"""How much of a step is spent waiting for data.

A step that is fed as training feeds it is timed against the same step on a batch that lies on the device already: what
it takes longer is waiting. From source, on a GPU, with the packages of `CARRIED` beside torch:

PYTHONPATH=src python benchmarks/data_wait.py --device cuda                 # vit-b-16 at 1,024, and first-run
PYTHONPATH=src python benchmarks/data_wait.py --device cpu --model tiny --batch 32 --steps 8

Of a run that is there, the share of its measured steps that each phase has (recorded steps have no phases):

python benchmarks/data_wait.py runs/first-run
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, prefetch
from lapclip.data.dataset import Pairs
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.machine.choose_device import (
    choose_compile,
    choose_device,
    default_threads,
    prepare_device,
)
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import read_events
from lapclip.training.cuda_graph import WARM_UP, AnyStep, make_step
from lapclip.training.feed import feed, ready
from lapclip.tuning.choose_kernels import choose_kernels

CARRIED = "filelock numpy pillow platformdirs psutil regex safetensors tokenizers tomli-w"
"""What `lapclip train` imports beside torch and what torch brings, where it is called from Python."""
EPOCHS = 3
"""How often each image is seen here."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "runs", nargs="*", type=Path, help="runs whose phases are shown; nothing is timed then"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="vit-b-16")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--first-run-steps", type=int, default=0, help="cut first-run short; 0 runs it to its end"
    )
    options = parser.parse_args()
    for folder in options.runs:
        print(phases_of(folder))
    if options.runs:
        return
    device, _ = choose_device(options.device)
    prepare_device(device, default_threads())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAPCLIP_CACHE"] = folder
        os.chdir(folder)
        rows = [large_images(options, device), first_run(options, device)]
    print(json.dumps({"device": device.label, "rows": rows}))


def large_images(options: argparse.Namespace, device: Device) -> dict:
    """Random images of the model's size, more than one batch of them, so that no cache of the processor has them."""
    shape, draw = SHAPES[options.model], np.random.default_rng(0)
    count = options.batch * max(2, -(-options.steps // EPOCHS // 4))
    captions = [["a house by the sea " * (1 + at % 2) + str(at)] for at in range(count)]
    tokenizer = CharacterTokenizer.learn([caption for (caption,) in captions])
    shape = replace(shape, vocabulary=tokenizer.vocabulary)
    pixels = draw.integers(0, 256, (count, shape.image_size, shape.image_size, 3), dtype=np.uint8)
    plan = BatchPlan(Pairs(pixels, captions), tokenizer, shape.context, options.batch, seed=0)
    how, _ = choose_compile(options.compile, device)
    train = TrainConfig(
        batch_size=options.batch, dtype=options.dtype, device=device.kind, compile=how, steps=10**6
    )
    forms, _ = choose_kernels(shape, train, plan.batch(1).tokens_BL.shape[1], device)
    step = make_step(CLIP(shape).to(device.torch), replace(train, **forms), device)  # pyright: ignore[reportArgumentType]
    return shown(f"{options.model} at {options.batch:,}", how, compared(step, plan, options), {})


def first_run(options: argparse.Namespace, device: Device) -> dict:
    """The default recipe: its steps alone, and in the loop of `lapclip train`, which also writes events."""
    from lapclip.commands.run_setup import set_up
    from lapclip.commands.train import train

    settings = [f"train.device={device.kind}"]
    settings += [f"train.steps={options.first_run_steps}"] if options.first_run_steps else []
    began = time.perf_counter()
    outcome = train("first-run", settings, name="run")
    whole = time.perf_counter() - began
    steps = [
        event for event in read_events(Path("runs/run/events.jsonl")) if event["type"] == "step"
    ]
    # Of a step that follows an evaluation or a checkpoint, the time between two events is not the step's.
    in_loop = statistics.median(
        later["time"] - event["time"] for event, later in pairwise(steps[WARM_UP + 10 :])
    )
    setup = set_up("first-run", settings, None)
    extra = {
        "in lapclip train": in_loop,
        "whole_seconds": whole,
        "training_seconds": outcome.training_seconds,
    }
    return shown(
        "first-run", setup.config.train.compile, compared(setup.step, setup.plan, options), extra
    )


def compared(step: AnyStep, plan: BatchPlan, options: argparse.Namespace) -> dict[str, float]:
    """Seconds a step in each way to have its batch, in turns; the median of rounds."""
    count, taken = options.steps, 0
    ways: dict[str, Callable[[int], AbstractContextManager]] = {
        "nothing to wait for": lambda first: Repeated(step, plan),
        "fed": lambda first: feed(plan, step, first, first + count - 1),
        "sent when asked for": lambda first: Prefetched(plan, first, first + count - 1),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, way in ways.items():
            seconds = take_steps(step, way, taken + 1, count)
            taken += count
            if turn:  # the first one compiles and records
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def take_steps(
    step: AnyStep, way: Callable[[int], AbstractContextManager], first: int, count: int
) -> float:
    """Seconds a step, each loss read while the next step runs."""
    off, pending = Stopwatch(step.device.synchronise, on=False), None
    with way(first) as batches:
        batch = next(batches)  # the first has nothing to hide behind
        step.device.synchronise()
        began = time.perf_counter()
        for number in range(first, first + count):
            read = step(batch, number, 1e-5, off)
            if pending is not None:
                pending()
            pending = read
            if number < first + count - 1:
                batch = next(batches)
        step.device.synchronise()
        return (time.perf_counter() - began) / count


class Repeated:
    """One batch, on the device where batches are sent ahead, again and again."""

    def __init__(self, step: AnyStep, plan: BatchPlan) -> None:
        self._batch = ready(step, plan.batch(1), 1)

    def __enter__(self):
        return iter(lambda: self._batch, None)

    def __exit__(self, *_: object) -> None:
        pass


class Prefetched:
    """Batches that are prepared by a thread, and sent when the step begins."""

    def __init__(self, plan: BatchPlan, first: int, last: int) -> None:
        self._batches = prefetch(plan, first, last)

    def __enter__(self):
        return self._batches

    def __exit__(self, *_: object) -> None:
        self._batches.close()


def shown(name: str, how: str, seconds: dict[str, float], extra: dict[str, float]) -> dict:
    """Print a row, and give it back."""
    right, fed = seconds["nothing to wait for"], seconds["fed"]
    found = ", ".join(f"{way} {spent * 1e3:.2f} ms" for way, spent in seconds.items())
    line = f"{name} ({how}): {found}; waiting for data {max(0.0, 1 - right / fed):.1%} of a step"
    if "in lapclip train" in extra:
        loop = extra["in lapclip train"]
        line += f", {max(0.0, 1 - right / loop):.1%} of one of {loop * 1e3:.2f} ms in lapclip train"
        line += f" ({extra['whole_seconds']:.1f} s in all, {extra['training_seconds']:.1f} s of training)"
    print(line, flush=True)
    return {"row": name, "compile": how, "seconds": seconds, **extra}


def phases_of(folder: Path) -> str:
    """The share of each phase in the measured steps of a run."""
    found = [
        event
        for event in read_events(folder / "events.jsonl")
        if event["type"] == "step" and event["seconds"]
    ]
    measured = [event["seconds"] for event in found]
    if len(measured) < 2:
        return f"{folder} has fewer than two measured steps"
    # The first batch has nothing to hide behind.
    totals = {
        phase: sum(seconds.get(phase, 0.0) for seconds in measured[1:]) for phase in measured[0]
    }
    whole = sum(totals.values())
    shares = ", ".join(f"{phase} {seconds / whole:.2%}" for phase, seconds in totals.items())
    return f"{folder}: {len(measured) - 1} steps of {whole / (len(measured) - 1) * 1e3:.1f} ms: {shares}"


if __name__ == "__main__":
    main()

"""Float8 against bfloat16 on an accelerator: is a step faster, do gradients agree, is nothing lost in learning?

    PYTHONPATH=src python benchmarks/float8.py steps        # steps in turns, and gradients against float32
    PYTHONPATH=src python benchmarks/float8.py learning     # first-run from three seeds in each precision, to its end

Steps are compiled, with kernels chosen as `lapclip train` chooses them. Gradients are those of a few pairs, compared
with float32 on the same device. Learning is `lapclip train` as users run it; what counts is the recall on pairs that
chose nothing, and how far three seeds are apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from steps import Row, interleave, our_step, random_batch, sending

from lapclip.data.batches import Batch
from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.text import counted
from lapclip.training.cuda_graph import WARM_UP

SHAPES_TIMED = [
    ("vit-b-32", 1024, 24),
    ("vit-b-16", 1024, 24),
    ("vit-l-14", 256, 24),
    ("seed", 256, 64),
]
PRECISIONS = ("bfloat16", "float8")
FEW = 64
"""Pairs whose gradients are compared."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("steps", "learning"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=[name for name, *_ in SHAPES_TIMED])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of each run; 0 is the recipe's own length"
    )
    options = parser.parse_args()
    if options.what == "learning":
        print(json.dumps(learning(options.seeds, options.minutes)))
        return
    device, _ = choose_device(options.device)
    prepare_device(device, default_threads())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAPCLIP_CACHE"] = (
            folder  # kernels are chosen in this run, not remembered from another
        )
        chosen = [sizes for sizes in SHAPES_TIMED if sizes[0] in options.models]
        print(json.dumps({"rows": [compare(*sizes, device, options.rounds) for sizes in chosen]}))


def compare(model: str, batch_size: int, caption_tokens: int, device: Device, rounds: int) -> dict:
    """Steps in both precisions, in turns, and how far the gradients of each are from float32."""
    rows = {dtype: Row(model, dtype, batch_size, caption_tokens) for dtype in PRECISIONS}
    batch, off = random_batch(rows["float8"]), Stopwatch(device.synchronise, on=False)
    right = gradients(Row(model, "float32", batch_size, caption_tokens), batch, device)
    cosines = {dtype: cosine(gradients(row, batch, device), right) for dtype, row in rows.items()}
    del right
    device.release_memory()
    sides = {dtype: sending(our_step(row, device), batch, off) for dtype, row in rows.items()}
    times = {
        dtype: statistics.median(found)
        for dtype, found in interleave(sides, device, rounds).items()
    }
    half, eight = (times[dtype] * 1e3 for dtype in PRECISIONS)
    print(
        f"train step, {model}, batch {batch_size}: float8 {half / eight:.2f}x bfloat16, {eight:.1f} ms against "
        f"{half:.1f} ms (median of {rounds}); gradients' cosine with float32 {cosines['float8']:.4f} and "
        f"{cosines['bfloat16']:.4f}",
        flush=True,
    )
    del sides
    device.release_memory()
    return {
        "model": model,
        "batch": batch_size,
        "ms": dict(zip(PRECISIONS, (half, eight), strict=True)),
    } | {"cosines": cosines}


def gradients(row: Row, batch: Batch, device: Device) -> list[torch.Tensor]:
    """Of all weights, for a few pairs, by steps of no length: the last one knows its scales."""
    few = Batch(
        batch.pixels_BSSC[:FEW],
        batch.tokens_BL[:FEW],
        batch.positives_BB[:FEW, :FEW],
        batch.sided_B[:FEW],
    )
    step = our_step(row, device, compile="none", clip_norm=0.0)
    for _ in range(WARM_UP):
        step(few, 1, 0.0, Stopwatch(device.synchronise, on=False))()
    return [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]


def cosine(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Between all gradients taken as one."""
    dot, one, other = (
        sum((a.double() * b.double()).sum().item() for a, b in zip(left, second, strict=True))
        for left, second in ((found, right), (found, found), (right, right))
    )
    return dot / math.sqrt(one * other)


def learning(seeds: list[int], minutes: float) -> dict:
    """The recall of whole runs."""
    found: dict[str, list[float]] = {dtype: [] for dtype in PRECISIONS}
    paths = [
        str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ]
    source = {"PYTHONPATH": os.pathsep.join(paths)}  # runs begin in another folder
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for dtype in PRECISIONS:
                command = [
                    sys.executable,
                    "-m",
                    "lapclip",
                    "train",
                    "--json",
                    "--name",
                    f"{dtype}-{seed}",
                ]
                command += ["--set", f"train.seed={seed}", "--set", f"train.dtype={dtype}"]
                command += ["--minutes", str(minutes)] if minutes else []
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=os.environ | source,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                evaluation = json.loads(done.stdout)["evaluation"]
                found[dtype].append((evaluation["t2i_r1"] + evaluation["i2t_r1"]) / 2)
                print(f"first-run, seed {seed}, {dtype}: R@1 {found[dtype][-1]:.1%}", flush=True)
    means = {dtype: statistics.mean(recalls) for dtype, recalls in found.items()}
    spread = max(found["bfloat16"]) - min(found["bfloat16"])
    lost = means["bfloat16"] - means["float8"]
    print(
        f"first-run, {counted(len(seeds), 'seed')}: R@1 {means['float8']:.1%} in float8, {means['bfloat16']:.1%} in "
        f"bfloat16, whose seeds are {spread:.1%} apart: {'nothing' if lost <= spread else 'something'} is lost"
    )
    return {"recalls": found, "means": means, "spread": spread}


if __name__ == "__main__":
    main()

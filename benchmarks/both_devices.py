"""A tower on each of two devices: does it learn what one device learns, and does a step take what is predicted?

    PYTHONPATH=src python benchmarks/both_devices.py --device cuda     # the CPU and a GPU, from source alone
    python benchmarks/both_devices.py      # both "devices" the CPU, with half of the threads each

Six shapes, each forced onto both devices. The same weights and batch on one device (the one that computes the loss) and
on two: the loss and all gradients must agree to rounding. On a GPU the tower there is recorded, as in `lapclip train`.
Then each tower is timed alone on its device, a step is predicted from that (`lapclip.tuning.predict_towers`), and real
steps with both at once are timed, in turns with steps on one device. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch

from lapclip.compare import random_batch
from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.choose_device import (
    choose_compile,
    choose_device,
    default_threads,
    pair_of,
    prepare_device,
)
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import WARM_UP, AnyStep, make_step
from lapclip.training.two_devices import SplitStep
from lapclip.tuning.flops import larger_share
from lapclip.tuning.predict_towers import predicted_from, time_parts, warm_up

GOAL = 0.15
"""How far a prediction may be from the truth."""
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 0.15), "float16": (2e-2, 0.15)}
"""The largest relative difference of the loss, and of all gradients by their norm. In half precision two devices round
differently in every layer, so gradients differ by several times the rounding of a number, 0.4 % in bfloat16."""


@dataclass(frozen=True)
class Row:
    """A model and batch, with one of its towers on the accelerator."""

    model: str
    batch: int
    accelerated: str
    dtype: str = "float32"
    compile: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.model} at {self.batch}, {self.dtype}, {self.accelerated} tower on the accelerator"


ROWS = [
    Row(
        "mini", 32, "image", compile="none"
    ),  # launched one operation at a time; the others are recorded
    Row("mini", 256, "text"),
    Row("seed", 12, "image", "bfloat16"),
    Row("seed", 8, "text"),
    Row("vit-b-32", 16, "image"),
    Row("vit-b-32", 64, "image", "bfloat16"),
]
SMALL_ROWS = [
    Row("tiny", 256, "image"),
    Row("tiny", 512, "text"),
    Row("mini", 32, "image", "bfloat16"),
    Row("mini", 128, "text"),
    Row("photos", 32, "image"),
    Row("mini", 256, "image", "bfloat16"),
]
"""For a CPU alone."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of the CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="rows that would begin later are left out"
    )
    options = parser.parse_args()
    accelerator, _ = choose_device(options.device)
    ends = time.perf_counter() + options.seconds
    rows = []
    for row in SMALL_ROWS if accelerator.is_cpu else ROWS:
        if time.perf_counter() > ends:
            print(f"{row.name}: no time was left")
            continue
        try:
            found = measure(row, accelerator, options.threads, options.rounds)
        except Exception as error:  # the other rows still say something
            traceback.print_exc()
            found = {
                "model": row.model,
                "batch": row.batch,
                "failed": f"{type(error).__name__}: {error}"[:500],
            }
        rows.append(found)
        print(f"{row.name}: FAILED" if "failed" in found else text(row, found), flush=True)
    errors = [abs(found["error"]) for found in rows if "error" in found]
    print(
        json.dumps(
            {
                "rows": rows,
                "device": accelerator.label,
                "threads": options.threads,
                "torch": str(torch.__version__),
                "equal": all(found.get("equal", False) for found in rows),
                "within_goal": sum(error <= GOAL for error in errors),
                "median_error": statistics.median(errors) if errors else None,
                "worst_error": max(errors, default=None),
            }
        )
    )


def text(row: Row, found: dict[str, Any]) -> str:
    """A row in words."""
    towers = ", ".join(f"{tower} {ms:.1f}" for tower, ms in found["tower_ms"].items())
    return (
        f"{row.name}: {'equal' if found['equal'] else 'NOT EQUAL'} (loss {found['loss_error']:.1e}, gradients "
        f"{found['gradient_error']:.1e}); predicted {found['predicted_ms']:.1f} ms, true {found['true_ms']:.1f} ms "
        f"({found['error']:+.0%}, goal within {GOAL:.0%}: {'met' if abs(found['error']) <= GOAL else 'MISSED'}); "
        f"alone: {towers}, exchange {found['exchange_ms']:.1f}, transfer {found['transfer_ms']:.1f} ms; on one device "
        f"{found['alone_ms']:.1f} ms, so together {found['speed']:.2f}x of at most {found['ceiling']:.2f}x"
    )


def measure(row: Row, accelerator: Device, threads: int, rounds: int) -> dict[str, Any]:
    """Equality, the prediction and the truth of one row."""
    on = {"image": Cpu(), "text": Cpu(), row.accelerated: accelerator}
    pair = pair_of(on["image"], on["text"])
    batch = random_batch(SHAPES[row.model], row.batch)
    errors = differences(row, batch, pair, accelerator, threads)
    split, alone = step_on(row, pair, threads), step_on(row, accelerator, threads)
    assert isinstance(split, SplitStep)
    off = Stopwatch(pair.synchronise, on=False)
    warm_up(split, batch)
    for _ in range(WARM_UP + 2):
        alone(batch, 1, 0.0, off)()
    parts: list[dict[str, float]] = []
    times: dict[str, list[float]] = {"split": [], "alone": []}
    for turn in range(rounds + 1):  # in turns: a machine that drifts drifts for all
        found = time_parts(split, batch)
        steps = {"split": split, "alone": alone}
        spent = {
            name: Timer(pair.synchronise).time_once(lambda step=step: step(batch, 1, 0.0, off)())
            for name, step in steps.items()
        }
        if turn:
            parts.append(found)
            for name, seconds in spent.items():
                times[name].append(seconds)
    predicted = predicted_from(parts)
    true, one = (statistics.median(spent) for spent in times.values())
    loss_most, gradient_most = TOLERANCE[row.dtype]
    _, share = larger_share(SHAPES[row.model], row.batch, batch.tokens_BL.shape[1])
    return {
        "model": row.model,
        "batch": row.batch,
        "dtype": row.dtype,
        "devices": {tower: device.kind for tower, device in on.items()},
        "loss_device": pair.of("loss").kind,
        "compile": split.config.compile,
        "loss_error": errors[0],
        "gradient_error": errors[1],
        "equal": errors[0] <= loss_most and errors[1] <= gradient_most,
        "predicted_ms": predicted.seconds * 1e3,
        "true_ms": true * 1e3,
        "error": predicted.seconds / true - 1,
        "tower_ms": {tower: found.total * 1e3 for tower, found in predicted.towers.items()},
        "exchange_ms": predicted.exchange * 1e3,
        "transfer_ms": predicted.transfer * 1e3,
        "waits": predicted.waits,
        "alone_ms": one * 1e3,
        "speed": one / true,
        "ceiling": 1 / share,
    }


def step_on(row: Row, device: Device, threads: int, **changes: Any) -> AnyStep:
    prepare_device(device, threads)
    kernels = Compute()
    train = TrainConfig(
        batch_size=row.batch,
        steps=1,
        dtype=row.dtype,
        compile=choose_compile(row.compile, device)[0],
        threads=threads,
        image_attention=kernels.attention,
        text_attention=kernels.attention,
        linear=kernels.linear,
    )
    train = replace(train, **device.settings, **changes)
    return make_step(CLIP(SHAPES[row.model], seed=1).place(device), train, device)


def differences(
    row: Row, batch: Batch, pair: Device, alone: Device, threads: int
) -> tuple[float, float]:
    """How far loss and gradients on two devices are from one device's, relative; steps of no length, so that the last
    one, which is replayed where it can be recorded, is computed from the same weights."""
    losses, gradients = [], []
    for device in (alone, pair):
        step = step_on(row, device, threads, clip_norm=0.0)
        off = Stopwatch(device.synchronise, on=False)
        metrics = [step(batch, 1, 0.0, off)() for _ in range(WARM_UP + 2)]
        losses.append(metrics[-1].loss)
        gradients.append(
            [p.grad.double().cpu() for p in step.model.parameters() if p.grad is not None]
        )
        del step
        device.release_memory()
    assert len(gradients[0]) == len(gradients[1]), "both learn the same weights"
    pairs = list(zip(*gradients, strict=True))
    apart = math.sqrt(sum((one - other).square().sum().item() for one, other in pairs))
    length = math.sqrt(sum(one.square().sum().item() for one, _ in pairs))
    return abs(losses[1] - losses[0]) / abs(losses[0]), apart / length


if __name__ == "__main__":
    main()

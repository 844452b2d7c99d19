"""The memory that `lapclip.training.memory` predicts for a run against the peak of a process that takes its steps.

    python benchmarks/memory_prediction.py [--rows seed mini-bfloat16]

Each row is measured in a fresh process: three steps on random pixels and captions, then the most memory it has held.
Seen on two cores (torch 2.13, Linux): mini, since GELU is computed again on the CPU, from 1 % to 17 % too high (the
latter in float32 with products); before that, all rows but the last, which was not reached, from 7 % too low (tiny,
float32, batches of 1,024 in parts of 128) to 10 % too high. A whole run also evaluates and loads its best model once
more, which is not among what is predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import numpy as np

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
from lapclip.training.memory import predict_bytes

STEPS = 3


@dataclass(frozen=True)
class Row:
    """A model and how it is trained. Both towers compute attention the same way."""

    model: str
    dtype: str
    batch: int
    micro: int
    caption_tokens: int
    attention: str = "fused"
    linear: str = "torch"
    recompute: bool = False

    @property
    def name(self) -> str:
        parts = [
            f"{self.model}-{self.dtype}",
            f"{self.batch}/{self.micro or self.batch}",
            self.attention,
            self.linear,
        ]
        return " ".join(parts + ["recompute"] * self.recompute)

    def settings(self, device: str) -> TrainConfig:
        return TrainConfig(
            batch_size=self.batch,
            micro_batch=self.micro,
            dtype=self.dtype,
            image_attention=self.attention,
            text_attention=self.attention,
            linear=self.linear,
            recompute=self.recompute,
            compile="none",
            device=device,
            steps=STEPS,
        )


ROWS = [
    Row("tiny", "float32", 16, 0, 64),
    Row("tiny", "float32", 1024, 0, 64),
    Row("tiny", "float32", 1024, 128, 64),
    Row("tiny", "float32", 1024, 0, 64, "products", "onednn"),
    Row("tiny", "bfloat16", 1024, 0, 64),
    Row("mini", "float32", 128, 0, 64),
    Row("mini", "float32", 512, 0, 64),
    Row("mini", "float32", 512, 64, 64),
    Row("mini", "float32", 512, 0, 64, "products", "onednn"),
    Row("mini", "bfloat16", 512, 0, 64),
    Row("mini", "bfloat16", 512, 128, 64, "products", "torch"),
    Row("seed", "float32", 2, 0, 40),
    Row("seed", "float32", 12, 0, 40),
    Row("seed", "float32", 12, 4, 40),
    Row("seed", "float32", 12, 0, 40, "products", "onednn"),
    Row("seed", "float32", 12, 0, 40, recompute=True),
    Row("seed", "float32", 32, 0, 40),
    Row("seed", "bfloat16", 12, 0, 40),
    Row("seed", "bfloat16", 32, 8, 40),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="parts of row names, such as seed-bfloat16"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(measure(ROWS[options.one], options.device))
        return
    results = []
    for number, row in enumerate(ROWS):
        if options.rows and not any(part in row.name for part in options.rows):
            continue
        command = [sys.executable, __file__, "--device", options.device, "--one", str(number)]
        peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        predicted = predict_bytes(
            SHAPES[row.model], row.settings(options.device), row.caption_tokens
        ).total
        results.append({**asdict(row), "predicted": predicted, "measured": peak})
        print(f"{row.name:50} predicted {predicted / 1e6:6,.0f} MB, measured {peak / 1e6:6,.0f} MB: "
              f"{predicted / peak - 1:+.0%}", flush=True)  # fmt: skip
    errors = [result["predicted"] / result["measured"] - 1 for result in results]
    print(f"from {min(errors):+.0%} to {max(errors):+.0%}")
    print(json.dumps({"rows": results}))


def measure(row: Row, wanted: str) -> int:
    """The peak of this process, on a device, over some steps."""
    device, _ = choose_device(wanted)
    prepare_device(device, default_threads())
    shape = SHAPES[row.model]
    step = make_step(CLIP(shape).to(device.torch), row.settings(device.kind), device)
    draw = np.random.default_rng(0)
    batch = Batch(
        pixels_BSSC=draw.integers(
            0, 256, (row.batch, shape.image_size, shape.image_size, 3), dtype=np.uint8
        ),
        tokens_BL=np.sort(
            draw.integers(0, shape.vocabulary, (row.batch, row.caption_tokens)), axis=1
        ),
        positives_BB=np.eye(row.batch, dtype=bool),
        sided_B=np.zeros(row.batch, dtype=bool),
    )
    for number in range(1, STEPS + 1):
        step(batch, number, 1e-4, Stopwatch(device.synchronise, on=False))()
    return device.peak_memory_bytes()


if __name__ == "__main__":
    main()

"""What a rank pays for being one: steps whose gradients go through the collective, in turns with the same steps alone.

    torchrun --standalone --nproc-per-node=1 benchmarks/together_one_rank.py cpu mini 128 float32
    torchrun --standalone --nproc-per-node=1 benchmarks/together_one_rank.py cuda vit-b-32 1024 bfloat16 compiled

Both are in one process and take turns, because two processes differ by more than this on a GPU that is fed by a busy
CPU. Random images, captions of 24 tokens; on CUDA the collective is nccl's. By default a single rank takes the way of a
process without torchrun (`train.shards` is 1 on GPUs), so this is what it would add beside others.
"""

from __future__ import annotations

import sys

from lapclip.config import TrainConfig
from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
from lapclip.machine.ranks import join
from lapclip.measure.phases import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.model.clip import CLIP
from lapclip.model.kernels import Compute
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
from lapclip.training.step import TrainStep
from lapclip.tuning.compare import random_batch


def main(kind: str, model: str, batch: str, dtype: str, compile: str = "none") -> None:
    device, _ = choose_device(kind)
    prepare_device(device, default_threads())
    pairs, off = random_batch(SHAPES[model], int(batch)), Stopwatch(device.synchronise, on=False)
    kernels = Compute()

    def step_with(shards: int) -> TrainStep:
        train = TrainConfig(
            batch_size=int(batch), steps=1, shards=shards, device=kind, dtype=dtype, compile=compile,
            image_attention=kernels.attention, text_attention=kernels.attention, linear=kernels.linear,
        )  # fmt: skip
        made = make_step(CLIP(SHAPES[model]).to(device.torch), train, device)
        assert isinstance(made, TrainStep)
        return made

    with join() as ranks:
        ranks.connect(device.collectives)
        alone, ranked = step_with(1), step_with(0)
        ranked.ranks = ranks
        steps = {"alone": alone, "ranked": ranked}
        runs = {
            name: (lambda step=step: step(pairs, 1, 1e-4, off)()) for name, step in steps.items()
        }
        timer = Timer(
            device.synchronise, rounds=31, min_rounds=9, max_seconds=90.0, warm_up_rounds=4
        )
        found = {name: timing.median for name, timing in timer.time_in_turns(runs).items()}
    lost = found["ranked"] / found["alone"] - 1
    verdict = "met" if lost <= 0.02 else "MISSED"
    print(
        f"one rank through the collective, {model} at {batch}, {dtype}, {compile}, {kind}: {lost:+.1%}: "
        f"{found['ranked'] * 1e3:.1f} ms a step against {found['alone'] * 1e3:.1f} ms; goal within 2 %: {verdict}",
        flush=True,
    )


main(*sys.argv[1:])

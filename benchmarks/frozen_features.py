"""How much faster an epoch is when what is frozen is computed once: cached features against computing them each time.

python benchmarks/frozen_features.py flickr8k [--recipe heads] [--start runs/heads]

Both ways take the same steps of the same run, in turns, in one process; packing and computing the features are not
counted, and told beside it. Needs the extra `small-towers`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from lapclip.commands.choose_recipe import read_request
from lapclip.measure.phases import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.runs.folder import TrainRequest
from lapclip.training.preparation import prepare
from lapclip.training.run_parts import build, make_plan

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--recipe", default="heads")
    parser.add_argument("--start", default="", help="a model to go on from")
    arguments = parser.parse_args()
    settings = [
        f"data.source={arguments.data}",
        *([f"train.start={arguments.start}"] if arguments.start else []),
    ]
    began = time.perf_counter()
    setup = prepare(read_request(TrainRequest(arguments.recipe, tuple(settings))))
    prepared = time.perf_counter() - began
    plain_plan = make_plan(setup.config, setup.data, setup.tokenizer)
    other, _ = build(setup.config, setup.tokenizer, setup.device, setup.initial_weights)
    off = Stopwatch(setup.device.synchronise, on=False)
    times: dict[str, list[float]] = {"cached": [], "plain": []}
    for number in range(1, ROUNDS + 2):  # the first round warms up
        for name, plan, taken in (("cached", setup.plan, setup.step), ("plain", plain_plan, other)):
            seconds = Timer(setup.device.synchronise).time_once(
                lambda: taken(plan.batch(number), number, 1e-5, off)()  # noqa: B023
            )
            times[name] += [seconds] if number > 1 else []
            print(f"{name}: step {number} in {seconds:.2f} s", flush=True)
    cached, plain = (statistics.median(times[name]) for name in ("cached", "plain"))
    epoch = setup.plan.steps_per_epoch
    print(
        f"frozen features, {arguments.recipe}, {len(setup.data.train):,} images: {plain / cached:.1f}x computing them "
        f"each time; an epoch {cached * epoch:.1f} s against {plain * epoch:.1f} s (median of {ROUNDS} steps each)"
    )
    print(
        json.dumps(
            {
                "ratio": plain / cached,
                "kept_seconds": cached * epoch,
                "plain_seconds": plain * epoch,
                "prepared_seconds": prepared,
                "notes": setup.notes,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

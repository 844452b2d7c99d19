"""Is what `lapclip tune` chooses the fastest there is? Its choice against an exhaustive sweep of the same candidates.

    .venv/bin/python benchmarks/tune_regret.py [--models tiny seed vit-b-32] [--seconds 60] [--rounds 5]

For each model: two tunings with caches of their own; then every combination of precision, threads, attention of each
tower and linear layers is timed once, and the best few of them race with the tuner's choice, in turns. The regret is
how much longer a step takes with the choice than with the best of the race. A few minutes for `tiny`, ten and more for
the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace

from steps import Row, random_batch

from lapclip.config import Config, DataConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine import facts
from lapclip.machine.choose_device import available, default_threads
from lapclip.measure.timing import Timer
from lapclip.model.shapes import SHAPES
from lapclip.tuning.kernels import forms_here
from lapclip.tuning.trial import Setting, TrialBench
from lapclip.tuning.tune import Tuner

ROWS = {"tiny": (128, 40), "mini": (128, 64), "seed": (12, 40), "vit-b-32": (32, 24)}
"""Batch and caption length of each model."""
FINALISTS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["tiny", "seed", "vit-b-32"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(
        json.dumps(
            {"rows": [regret(model, options.seconds, options.rounds) for model in options.models]}
        )
    )


def regret(model: str, seconds: float, rounds: int) -> dict:
    """Tune twice, sweep, and let the best race."""
    batch_size, caption_tokens = ROWS[model]
    batch = random_batch(Row(model, "float32", batch_size, caption_tokens))
    config = Config(
        model=SHAPES[model], data=DataConfig(), train=TrainConfig(batch_size=batch_size, steps=1000)
    )
    tunings = [tune(config, batch, seconds) for _ in range(2)]
    chosen = tunings[0].setting
    swept = sweep(config, batch)
    finalists = [*sorted(swept, key=swept.__getitem__)[:FINALISTS]]
    times = race(config, batch, dict.fromkeys([chosen, *finalists]), rounds)
    best = min(times, key=times.__getitem__)
    lost = times[chosen] / times[best] - 1
    print(
        f"tune, {model}, batch {batch_size}: regret {lost:.1%} of {len(swept)} candidates (chosen {text(chosen)}, "
        f"{times[chosen] * 1e3:.1f} ms; best {text(best)}, {times[best] * 1e3:.1f} ms); tuned in "
        f"{' and '.join(f'{tuning.seconds:.0f} s' for tuning in tunings)}, "
        f"{'the same twice' if tunings[0].setting == tunings[1].setting else f'then {text(tunings[1].setting)}'}",
        flush=True,
    )
    return {
        "model": model,
        "batch": batch_size,
        "regret": lost,
        "chosen": asdict(chosen),
        "again": asdict(tunings[1].setting),
        "best": asdict(best),
        "seconds": [tuning.seconds for tuning in tunings],
        "candidates": len(swept),
    }


def tune(config: Config, batch: Batch, seconds: float):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAPCLIP_CACHE"] = folder
        return Tuner(config, batch, seconds, lambda what: print(f"  {what}", file=sys.stderr)).run()


def sweep(config: Config, batch: Batch) -> dict[Setting, float]:
    """One step of everything, after one to warm up."""
    bench, threads = TrialBench(config, batch), default_threads()
    counts = {threads, facts.logical_cores(), max(1, threads // 2)}
    times: dict[Setting, float] = {}
    for device in available():
        dtypes = ("float32", "bfloat16") if device.is_cpu else ("float32", "bfloat16", "float16")
        plain = Setting(device.kind, compile="graph" if device.records_graphs else "none")
        for dtype, count in itertools.product(dtypes, counts):
            kernels = {
                name: forms_here(name, device, dtype)
                for name in ("image_attention", "text_attention", "linear")
            }
            for forms in itertools.product(*kernels.values()):
                chosen = dict(zip(kernels, forms, strict=True))
                setting = replace(plain, dtype=dtype, threads=count, **chosen)
                trial = bench.start(setting)
                trial.warm_up()
                times[setting] = trial.timer.time_once(trial.step_once)
                print(f"  {text(setting)}: {times[setting] * 1e3:.1f} ms", file=sys.stderr)
    return times


def race(
    config: Config, batch: Batch, settings: dict[Setting, None], rounds: int
) -> dict[Setting, float]:
    """Median seconds, in turns. Each turn builds its trial anew, because many at once may not fit into memory."""
    bench = TrialBench(config, batch)
    times: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            trial = bench.start(setting)
            trial.warm_up()
            timer = Timer(trial.device.synchronise, rounds=3, warm_up_rounds=0)
            times[setting].append(timer.time_one(trial.step_once).median)
    return {setting: statistics.median(seconds) for setting, seconds in times.items()}


def text(setting: Setting) -> str:
    forms = f"{setting.image_attention}, {setting.text_attention}, {setting.linear}"
    return f"{setting}, {forms}"


if __name__ == "__main__":
    main()

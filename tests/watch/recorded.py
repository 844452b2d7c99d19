"""Runs written by hand, as a training would have written them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

STEPS = 200
PER_EPOCH = 20
PARTS = (
    "temperature",
    "image.embedding",
    "image.0",
    "image.head",
    "text.embedding",
    "text.0",
    "text.head",
)


def started(at: float, **fields: Any) -> dict[str, Any]:
    config = {
        "model": {"name": "mini"},
        "train": {"batch_size": 64, "steps": STEPS, "evaluate_every_epochs": 2},
    }
    return {
        "type": "started", "time": at, "config": config, "reasons": {}, "versions": {}, "commit": None,
        "machine": {"chip": "a chip", "memory_bytes": 16_000_000_000}, "devices": {"image": "cpu", "text": "cpu"},
        "steps": STEPS, "steps_per_epoch": PER_EPOCH, "pairs": {"train": 1280}, "parameters": 1000, "notes": [],
        "chance_loss": math.log(64),
        **fields,
    }  # fmt: skip


def step(number: int, at: float, **fields: Any) -> dict[str, Any]:
    learnt = 1 - math.exp(-number / 60)
    seconds = {
        "load": 0.001,
        "preprocess": 0.01,
        "transfer": 0.002,
        "forward": 0.08,
        "backward": 0.15,
        "optimizer": 0.01,
    }
    return {
        "type": "step", "time": at, "step": number, "epoch": -(-number // PER_EPOCH), "loss": 4.2 * (1 - learnt),
        "t2i_accuracy": learnt, "i2t_accuracy": learnt, "logit_scale": 2.6, "temperature": 0.07 - 0.02 * learnt,
        "lr": 1e-3,
        "grad_norm": 5.0, "grad_norms": {part: 1.0 + place for place, part in enumerate(PARTS)},
        "seconds": seconds if number <= 10 or number % 50 == 0 else None, **fields,
    }  # fmt: skip


def scores(recall: float) -> dict[str, Any]:
    values = {
        f"{way}_r{rank}": min(1.0, recall * rank**0.3)
        for way in ("t2i", "i2t")
        for rank in (1, 5, 10)
    }
    intervals = {name: [value * 0.9, min(1.0, value * 1.1)] for name, value in values.items()}
    return {"candidates": 240, "chance": 1 / 240, **values, "intervals": intervals}


def evaluation(number: int, at: float, recall: float, best: bool = True) -> dict[str, Any]:
    return {
        "type": "evaluation", "time": at, "step": number, "epoch": number // PER_EPOCH, "split": "val",
        "evaluation": scores(recall), "seconds": 0.5, "best": best,
    }  # fmt: skip


def sensors(number: int, at: float, joules: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "type": "sensors", "time": at, "step": number, "joules": None if joules is None else {"package": joules},
        "celsius": 71.0, "megahertz": 3200.0, "core_use": [0.95, 0.4, 0.9, 0.02], "swap_bytes": 0, "throttled": False,
        "reason": "not measurable here: only root may read the counters" if joules is None else None, **fields,
    }  # fmt: skip


def trained(until: int, ago: float = 0.0, joules: bool = True) -> list[dict[str, Any]]:
    """A run until this step, whose last event was so many seconds ago; half a second a step."""
    at = time.time() - ago - 0.5 * until - 0.5 * (until // (2 * PER_EPOCH))
    events = [started(at)]
    for number in range(1, until + 1):
        events.append(step(number, at := at + 0.5))
        if number == 1 or number % 50 == 0:
            events.append(
                {
                    "type": "memory",
                    "time": at,
                    "step": number,
                    "process_bytes": 7e8,
                    "peak_bytes": 9e8,
                }
            )
        if number % 20 == 0:
            events.append(sensors(number, at, 9.0 * number if joules else None))
        if number % (2 * PER_EPOCH) == 0:
            # The evaluation after step 120 is the best; what follows is worse.
            recall = number / 200 if number <= 120 else 0.4
            events.append(evaluation(number, at := at + 0.5, recall, best=number <= 120))
    return events


def finished(joules: bool = True) -> list[dict[str, Any]]:
    events = trained(STEPS, joules=joules)
    return [
        *events,
        {
            "type": "finished", "time": events[-1]["time"] + 0.5, "step": STEPS, "training_seconds": 100.0,
            "pairs_per_second": 128.0, "peak_memory_bytes": 900_000_000, "places": [],
            "evaluation": {"split": "test", **scores(0.55)},
        },
    ]  # fmt: skip


def write(folder: Path, name: str, events: list[dict[str, Any]]) -> Path:
    """A run's folder under runs/ in `folder`."""
    run = folder / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.toml").write_text('[run]\nformat = 1\nrecipe = "first-run"\n')
    append(run, events)
    return run


def append(run: Path, events: list[dict[str, Any]]) -> None:
    with open(run / "events.jsonl", "a") as file:
        file.writelines(
            json.dumps({"v": 1, **event}, separators=(",", ":")) + "\n" for event in events
        )

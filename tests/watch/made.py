"""Runs made by hand, for what a real one cannot be brought to do, and the real server."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from lapclip.runs.folder import FORMAT, Run

from ..served import Served, ending, start

Events = list[dict[str, Any]]
HOSTILE = '<img src=x onerror="window.hacked=1"><b>&amp;\''
BEGAN = 1_790_000_000.0


def started(steps: int = 100, **fields: Any) -> dict[str, Any]:
    config = {"model": {"name": "tiny"}, "train": {"batch_size": 16, "dtype": "float32"}}
    machine = {"chip": "a chip", "cores": 2, "memory_bytes": 8_000_000_000}
    return {"v": 1, "type": "started", "time": BEGAN, "config": config, "machine": machine, "steps": steps,
            "devices": {"image": "cpu", "text": "cpu"}, "parameters": 1_300_000, "notes": [],
            "chance_loss": math.log(16), **fields}  # fmt: skip


def step(number: int, **fields: Any) -> dict[str, Any]:
    norms = {"image.embedding": 1.0, "image.0": 0.5, "text.0": 0.7, "temperature": 0.1}
    phases = {"load": 0.01, "forward": 0.05, "backward": 0.1} if number % 10 == 1 else None
    return {"v": 1, "type": "step", "time": BEGAN + number, "step": number, "epoch": 1 + number // 10,
            "loss": 2.8 / (1 + number / 50), "t2i_accuracy": 0.1, "i2t_accuracy": 0.2, "temperature": 0.07, "lr": 1e-3,
            "grad_norm": 2.0, "grad_norms": norms, "seconds": phases, **fields}  # fmt: skip


def evaluation(number: int, recall: float) -> dict[str, Any]:
    scores = {
        f"{way}_r{rank}": min(1.0, recall * rank**0.3)
        for way in ("t2i", "i2t")
        for rank in (1, 5, 10)
    }
    values = {
        **scores,
        "candidates": 240,
        "chance": 1 / 240,
        "intervals": {"t2i_r1": [recall * 0.9, recall * 1.1]},
    }
    return {"v": 1, "type": "evaluation", "time": BEGAN + number + 0.5, "step": number, "epoch": number // 10,
            "split": "val", "evaluation": values, "seconds": 0.2, "best": True}  # fmt: skip


def looked(
    number: int, rank: int, captions: Sequence[str] = ("a red cat on the left.",)
) -> dict[str, Any]:
    """Image 17 is right; the user asked for one of their own as well."""
    top = [{"picture": image, "score": 0.5 - image / 100} for image in (1, 2, 3, 4, 5)]
    if rank <= 5:
        top[rank - 1]["picture"] = 17
    answers = [
        {"caption": text, "own": False, "right": 17, "rank": rank, "top": top} for text in captions
    ]
    answers.append({"caption": "my own dog", "own": True, "right": None, "rank": None, "top": top})
    return {"v": 1, "type": "looked", "time": BEGAN + number + 0.6, "step": number, "epoch": number // 10,
            "answers": answers}  # fmt: skip


def sensors(number: int) -> dict[str, Any]:
    return {"v": 1, "type": "sensors", "time": BEGAN + number + 0.1, "step": number, "joules": {"cpu": 5.0 * number},
            "celsius": 60.0, "megahertz": 3000.0, "core_use": [0.9, 0.5], "swap_bytes": 0, "throttled": False,
            "reason": None}  # fmt: skip


def memory(number: int) -> dict[str, Any]:
    return {"v": 1, "type": "memory", "time": BEGAN + number + 0.2, "step": number, "process_bytes": 600_000_000,
            "peak_bytes": 700_000_000}  # fmt: skip


def ranks(number: int, **fields: Any) -> dict[str, Any]:
    """The desktop waits for the laptop."""
    return {"v": 1, "type": "ranks", "time": BEGAN + number + 0.3, "step": number, "hosts": ["desktop", "laptop"],
            "rows": [96, 32], "waited": [0.42, 0.03], "writer": 0, "advice": "laptop is slowest",
            **fields}  # fmt: skip


def ended(number: int, kind: str = "finished", **fields: Any) -> dict[str, Any]:
    return {"v": 1, "type": kind, "time": BEGAN + number + 1, "step": number, **fields}


def learning_run(steps: int = 60) -> Events:
    """A run that learns and has told everything but its end."""
    events = [started(steps)]
    for number in range(1, steps + 1):
        events.append(step(number))
        if number % 10 == 0:
            rank = max(1, 40 // number)
            events += [
                memory(number),
                sensors(number),
                evaluation(number, number / 100),
                looked(number, rank),
            ]
    return events


def make_run(name: str, events: Events, images: Sequence[int] = (1, 2, 3, 4, 5, 17)) -> Run:
    """runs/NAME in the current folder."""
    run = Run(Path("runs") / name)
    run.path.mkdir(parents=True)
    run.settings.write_text(f"[run]\nformat = {FORMAT}\nrecipe = 'first-run'\n", encoding="utf-8")
    append(run, events)
    (run.path / "pictures").mkdir()
    for number in images:
        Image.new("RGB", (96, 96), (number * 12 % 256, 120, 200)).save(
            run.path / "pictures" / f"{number}.png"
        )
    return run


def append(run: Run, events: Events) -> None:
    with open(run.events, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(event, separators=(",", ":")) + "\n" for event in events)


def start_server(*names: str, host: str = "127.0.0.1", port: int | None = 0) -> Served:
    """Serve the current folder, by a server that may read as often as it likes: a polite one is waited for."""
    program = (
        "import sys; from lapclip.watch.web import feed, serve; feed.SHARE = 1.0; "
        f"sys.exit(serve({list(names)!r}, {host!r}, {port!r}))"
    )
    return start([sys.executable, "-c", program])


@contextmanager
def server(*names: str, host: str = "127.0.0.1", port: int | None = 0) -> Iterator[Served]:
    with ending(start_server(*names, host=host, port=port)) as served:
        yield served

"""Softmax against sigmoid: the same recipe with each loss, three seeds each, scored on the same held-out pairs.

    python benchmarks/losses.py                                        # the recipe first-run, on drawn scenes
    python benchmarks/losses.py flickr8k --recipe heads  # photos

Runs go to a temporary folder. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

LOSSES = ("softmax", "sigmoid")
METRICS = ("t2i_r1", "t2i_r5", "t2i_r10", "i2t_r1", "i2t_r5", "i2t_r10")


def train(loss: str, seed: int, data: list[str], more: list[str], folder: Path) -> dict[str, Any]:
    """One whole run in a process of its own."""
    settings = [
        "--set",
        f"train.loss={loss}",
        "--set",
        f"train.seed={seed}",
        "--name",
        f"{loss}-{seed}",
    ]
    command = [sys.executable, "-m", "lapclip", "train", *data, *more, *settings, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES))
    parser.add_argument("--recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING", dest="settings")
    known = parser.parse_args()
    more = ["--recipe", known.recipe] * bool(known.recipe)
    more += [word for setting in known.settings for word in ("--set", setting)]
    data = [str(Path(known.data).resolve())] if known.data else []
    folder = Path(tempfile.mkdtemp(prefix="lapclip-losses-"))
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(known.seeds):  # in turns, so that a machine that drifts is no advantage
        for loss in known.losses:
            found.setdefault(loss, []).append(train(loss, seed, data, more, folder))
    print(
        f"{'':10}{'R@1':>16}{'R@5':>16}{'R@10':>16}   text to image, then image to text, % (spread of the seeds)"
    )
    for loss, runs in found.items():
        for way in ("t2i", "i2t"):
            cells = [
                [run["evaluation"][f"{way}_r{rank}"] * 100 for run in runs] for rank in (1, 5, 10)
            ]
            row = "".join(
                f"{statistics.mean(cell):9.1f} ({max(cell) - min(cell):4.1f})" for cell in cells
            )
            print(f"{loss if way == 't2i' else '':10}{row}")
    scores = {
        loss: [{name: run["evaluation"][name] for name in METRICS} for run in runs]
        for loss, runs in found.items()
    }
    first = next(iter(found.values()))[0]
    about = {
        "candidates": first["evaluation"]["candidates"],
        "steps": first["steps"],
        "devices": first["devices"],
    }
    seconds = {
        loss: [round(run["training_seconds"], 1) for run in runs] for loss, runs in found.items()
    }
    print(
        json.dumps(
            {"torch": torch.__version__, **about, "training_seconds": seconds, "metrics": scores}
        )
    )


if __name__ == "__main__":
    main()

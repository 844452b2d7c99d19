"""Is anything lost when a run is killed? Runs killed with SIGKILL at random moments and resumed until they finish.

    .venv/bin/python benchmarks/killed_runs.py [--runs 20] [--steps 60]

Each is compared, step by step, with an undisturbed run of the default recipe.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    settings = [
        f"train.steps={options.steps}",
        "train.checkpoint_every_seconds=2",
        "train.dtype=float32",
    ]
    flags = [word for setting in (*settings, "train.device=cpu") for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        _start(base / "undisturbed", "train", *flags).wait()
        want, _, _, longest = read(base / "undisturbed")
        lost = differing = kills = 0
        worst = 0
        for number in range(options.runs):
            run = base / f"run-{number}"
            kills += disturb(run, flags, chance)
            got, replayed, conflicts, _ = read(run)
            lost += set(got) != set(want)
            differing += conflicts + sum(got[step] != want[step] for step in got if step in want)
            worst = max(worst, replayed)
            print(
                f"run {number + 1} of {options.runs}: {kills} kills so far, {lost} lost, {differing} differing losses"
            )
    print(
        f"{options.runs} runs, {kills} kills: {lost} lost, {differing} differing losses; at most {worst} steps "
        f"repeated after a kill, the most between two checkpoints being {longest} (undisturbed run)"
    )
    sys.exit(bool(lost or differing))


def disturb(run: Path, flags: list[str], chance: random.Random) -> int:
    """Train, killing and resuming up to five times, then let it finish. Returns how often it was killed."""
    kills = 0
    process = _start(run, "train", *flags)
    while not list(run.glob("runs/*/run.toml")) and process.poll() is None:
        time.sleep(0.01)
    for _ in range(5):
        time.sleep(chance.uniform(0, 6))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        process = _start(run, "resume")
    process.wait()
    return kills


def read(run: Path) -> tuple[dict[int, float], int, int, int]:
    """Losses by step, the most steps repeated after one kill, disagreeing repeats, the longest checkpoint interval."""
    losses: dict[int, float] = {}
    worst = conflicts = longest = last_saved = newest = 0
    for line in next(run.glob("runs/*/events.jsonl")).read_text().splitlines():
        event = json.loads(line)
        if event["type"] == "step":
            conflicts += losses.setdefault(event["step"], event["loss"]) != event["loss"]
            newest = event["step"]
        elif event["type"] == "resumed":
            worst = max(worst, newest - event["step"])
        elif event["type"] == "checkpoint":
            longest, last_saved = max(longest, event["step"] - last_saved), event["step"]
    return losses, worst, conflicts, longest


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lapclip", *arguments]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()

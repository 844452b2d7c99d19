"""How long the default recipe takes to find 60 % of the held-out pairs, and how long with changes to it.

    python benchmarks/time_to_recall.py [--seeds 0 1 2]                               # the recipe alone
    python benchmarks/time_to_recall.py --change train.optimizer=adamw --change train.warmup=0.2 [--seeds 0 1 2]

Each --change is made to the second side only; everything else is the same. Runs take turns and end at the goal; the
clock includes the evaluation after every epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lapclip.runs.events import read_events

GOAL = 0.6  # text-to-image R@1 on the validation pairs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--change", action="append", default=[], dest="changes", metavar="SECTION.FIELD=VALUE"
    )
    options = parser.parse_args()
    sides = {"recipe": [], **({"changed": options.changes} if options.changes else {})}
    times: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for side, changes in sides.items():
                settings = [f"train.seed={seed}", "train.evaluate_every_epochs=1", *changes]
                seconds, line = train(Path(folder), f"{side}-{seed}", settings)
                times[side].append(seconds)
                print(f"{side}, seed {seed}: {line}", flush=True)
    medians = {side: statistics.median(seconds) for side, seconds in times.items()}
    found = {"goal": GOAL, "seconds": times, "median_seconds": medians}
    if options.changes:
        found["ratio"] = medians["recipe"] / medians["changed"]
    print(json.dumps(found))


def train(folder: Path, name: str, settings: list[str]) -> tuple[float, str]:
    """Seconds of training until the goal, where the run is ended, and the epoch of it."""
    command = [sys.executable, "-m", "lapclip", "train", "--json", "--name", name]
    for setting in settings:
        command += ["--set", setting]
    run = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path = folder / "runs" / name / "events.jsonl"
    try:
        while True:
            ended = run.poll() is not None
            events = list(read_events(path)) if path.exists() else []
            scored = [event for event in events if event["type"] == "evaluation"]
            for event in scored:
                if event["evaluation"]["t2i_r1"] >= GOAL:
                    seconds = event["time"] - next(
                        first["time"] for first in events if first["type"] == "started"
                    )
                    return (
                        seconds,
                        f"T2I R@1 on val at {GOAL:.0%} after {seconds:.1f} s, epoch {event['epoch']}",
                    )
            if ended:
                return float(
                    "inf"
                ), f"T2I R@1 on val never at {GOAL:.0%} (exit status {run.returncode})"
            time.sleep(0.5)
    finally:
        run.terminate()
        run.wait()


if __name__ == "__main__":
    main()

"""A run epoch by epoch: loss, accuracy in training batches, accuracy on held-out pairs in batches of the same size.

    .venv/bin/python benchmarks/epoch_table.py runs/seed

For the seed recipe, the published run it reproduces: 39 minutes on an M1, loss 3.25 to 1.89, training accuracy 7.9 %
to 22.7 %, validation 12.5 % to 14.6 %.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from lapclip.runs.events import read_events


def main(run: str) -> None:
    losses, accuracies, ends = defaultdict(list), defaultdict(list), {}
    held_out: dict[int, dict] = {}
    started = 0.0
    for event in read_events(Path(run) / "events.jsonl"):
        if event["type"] == "started":
            started = event["time"]
            print(
                f"commit {event['commit']}, torch {event['versions']['torch']}, {event['machine']['chip']}"
            )
        elif event["type"] == "step":
            losses[event["epoch"]].append(event["loss"])
            accuracies[event["epoch"]].append((event["t2i_accuracy"] + event["i2t_accuracy"]) / 2)
        elif event["type"] == "evaluation":
            held_out[event["epoch"]] = event["evaluation"]["in_batch"]
            ends[event["epoch"]] = event["time"]
    print(
        "| epoch | loss | training accuracy | validation accuracy (95 % interval) | minutes |\n|---|---|---|---|---|"
    )
    for epoch in losses:
        scores = held_out.get(epoch)
        low, high = scores["interval"] if scores else (0, 0)
        validation = f"{scores['accuracy']:.1%} ({low:.1%} to {high:.1%})" if scores else ""
        minutes = f"{(ends[epoch] - started) / 60:.1f}" if epoch in ends else ""
        print(
            f"| {epoch} | {mean(losses[epoch]):.3f} | {mean(accuracies[epoch]):.1%} | {validation} | {minutes} |"
        )


if __name__ == "__main__":
    main(sys.argv[1])

"""How many photos with captions does a person need? The recipe heads on more and more of them, scored on the same ones.

    python benchmarks/how_many_photos.py flickr8k/captions.csv [--counts 50 200 1000 3000] [--captions 1]

The table has the columns filepath, caption and split. Of its training images some are drawn (seed 0), with their first
--captions captions (default: all). All of val is scored, with the correction for hubness and without. Runs are named
count-N or count-N-CAPTIONS; those that are there are taken. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import EvaluationRequest
from lapclip.commands.train import train
from lapclip.runs.folder import TrainRequest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--counts", type=int, nargs="*", default=[50, 200, 1000, 3000])
    parser.add_argument("--captions", type=int)
    wanted = parser.parse_args()
    rows = list(csv.DictReader(wanted.table.open(encoding="utf-8")))
    found = {count: measured(wanted.table, rows, count, wanted.captions) for count in wanted.counts}
    print(json.dumps(found))


def measured(
    table: Path, rows: list[dict[str, str]], count: int, captions: int | None
) -> dict[str, Any]:
    name = f"count-{count}-{captions}" if captions else f"count-{count}"
    if not (Path("runs") / name / "run.toml").exists():
        where = {
            "source": str(subset(rows, count, captions)),
            "pictures": str(table.parent.absolute()),
        }
        settings = tuple(f"data.{key}={json.dumps(value)}" for key, value in where.items())
        train(TrainRequest("heads", settings), name=name)
    result = evaluate(EvaluationRequest(name, split="val"))
    whole, words = result["hubness"], result["short_questions"]
    low, high = result["evaluation"]["intervals"]["t2i_r1"]
    print(
        f"{count:>6,} images: text to image R@1 {whole['t2i_r1']:.1%} ({low:.1%} to {high:.1%}), with the correction "
        f"{whole['t2i_r1_with']:.1%}, R@10 {whole['t2i_r10']:.1%}, mAP of single words {words['map']:.3f}",
        flush=True,
    )
    return {
        "t2i_r1": whole["t2i_r1"],
        "t2i_r1_with": whole["t2i_r1_with"],
        "t2i_r10": whole["t2i_r10"],
        "map": words["map"],
    }


def subset(rows: list[dict[str, str]], count: int, captions: int | None) -> Path:
    """Write a table with `count` training images, `captions` captions for each, and all other splits whole."""
    images = sorted({row["filepath"] for row in rows if row["split"] == "train"})
    drawn = {images[at] for at in np.random.default_rng(0).permutation(len(images))[:count]}
    path = Path(f"count-{count}-{captions or 'all'}.csv").absolute()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["filepath", "caption", "split"])
        writer.writeheader()
        written = Counter[str]()
        for row in rows:
            is_wanted = row["filepath"] in drawn and (
                captions is None or written[row["filepath"]] < captions
            )
            if row["split"] != "train" or is_wanted:
                writer.writerow(row)
                written[row["filepath"]] += 1
    return path


if __name__ == "__main__":
    main()

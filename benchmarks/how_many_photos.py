"""How many photos with captions does a person need? The recipe heads on more and more of them, scored on the same ones.

    python benchmarks/how_many_photos.py flickr8k/captions.csv [--counts 50 200 1000 3000]

The table has the columns filepath, caption and split. Of its training images some are drawn (seed 0); all of val is
scored, with the correction for hubness and without. Runs are named count-N; those that are there are taken. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.commands.evaluate import EvaluationRequest, evaluate
from lapclip.commands.train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--counts", type=int, nargs="*", default=[50, 200, 1000, 3000])
    wanted = parser.parse_args()
    rows = list(csv.DictReader(wanted.table.open(encoding="utf-8")))
    found = {count: measured(wanted.table, rows, count) for count in wanted.counts}
    print(json.dumps(found))


def measured(table: Path, rows: list[dict[str, str]], count: int) -> dict[str, Any]:
    name = f"count-{count}"
    if not (Path("runs") / name / "run.toml").exists():
        where = {"source": str(subset(rows, count)), "pictures": str(table.parent.absolute())}
        train("heads", [f"data.{key}={json.dumps(value)}" for key, value in where.items()], name=name)
    result = evaluate(EvaluationRequest(name, split="val"))
    whole, words = result["hubness"]["whole"], result["short_questions"]
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


def subset(rows: list[dict[str, str]], count: int) -> Path:
    """A table with so many of the training images, and all that are not for training."""
    images = sorted({row["filepath"] for row in rows if row["split"] == "train"})
    drawn = {images[at] for at in np.random.default_rng(0).permutation(len(images))[:count]}
    path = Path(f"count-{count}.csv").absolute()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["filepath", "caption", "split"])
        writer.writeheader()
        for row in rows:
            if row["split"] != "train" or row["filepath"] in drawn:
                writer.writerow(row)
    return path


if __name__ == "__main__":
    main()

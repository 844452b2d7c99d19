"""Draws the figures of the pages under "Understand" from runs of this folder, which it trains where they are missing.

    python docs/figures.py

The default run, and eleven short ones of the model `tiny`, all on the drawn scenes: some five minutes on two cores.
Writes docs/learning.svg, docs/pairs.svg, docs/batches.svg and docs/draws.svg, and prints the numbers in them. Plots of
tables are made by docs/plots.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from plots import Axis, Point, Series, draw, numbered

from lapclip.commands.evaluation_data import (
    EvaluationRequest,
    choose_data,
    find_model,
    open_data,
)
from lapclip.embedder import load
from lapclip.evaluation.intervals import bootstrap_interval
from lapclip.evaluation.ranks import ranks
from lapclip.runs.folder import find_run
from lapclip.runs.view import RunView, view_of

DOCS = Path(__file__).parent
PAIRS, BATCHES = (150, 300, 600, 1250, 2500, 5000), (8, 16, 32, 64, 128)
STEPS, SEEN = 300, 20_000
"""Updates of each run with another number of pairs; pairs that each run with another batch sees."""
SMALL = (
    "model.name=tiny",
    "train.threads=1",
    "train.dtype=float32",
    "train.evaluate_every_epochs=10",
)
"""What all runs but the first have in common. Nothing is left to the tuner, which might choose otherwise for each."""
DRAWS, DRAWN = 40, 60
SHARES = numbered("right answers", 0, 100, range(0, 101, 20), " %")


def main() -> None:
    learning(trained("first-run"))
    runs = [
        trained(f"pairs-{n}", *SMALL, f"data.train_pairs={n}", f"train.steps={STEPS}")
        for n in PAIRS
    ]
    accuracy = [100 * run.small_curve("accuracy").y[-1] for run in runs]
    lines = {"accuracy in training batches": accuracy, "held-out R@1": recalls(runs)}
    save(
        "pairs",
        "Accuracy and recall by the number of pairs",
        over("pairs to learn from", PAIRS),
        joined(PAIRS, lines),
    )
    runs = [
        trained(f"batch-{n}", *SMALL, f"train.batch_size={n}", f"train.steps={SEEN // n}")
        for n in BATCHES
    ]
    lines = {"held-out R@1": recalls(runs)}
    save(
        "batches",
        "Recall by the size of a batch",
        over("pairs in a batch", BATCHES),
        joined(BATCHES, lines),
    )
    draws("pairs-2500")


def trained(name: str, *settings: str) -> RunView:
    if not (Path("runs") / name / "model").exists():
        changes = [part for setting in settings for part in ("--set", setting)]
        subprocess.run(
            [sys.executable, "-m", "lapclip", "train", "--name", name, *changes], check=True
        )
    return view_of(find_run(name))


def recalls(runs: Sequence[RunView]) -> list[float]:
    return [100 * (run.best_recall or 0.0) for run in runs]


def learning(run: RunView) -> None:
    """Loss of a whole run, as a share of that of guessing, beside accuracy and recall."""
    loss, accuracy, recall = (
        run.small_curve("loss"),
        run.small_curve("accuracy"),
        run.metric("t2i_r1"),
    )
    phases = run.summary.phases()
    print("phases", {name: f"{value / sum(phases.values()):.1%}" for name, value in phases.items()})
    series = [
        dotless("loss, of that of guessing", loss.x, [100 * y / loss.y[0] for y in loss.y]),
        dotless("accuracy in training batches", accuracy.x, [100 * y for y in accuracy.y]),
        Series(
            "held-out R@1", [Point(x, 100 * y) for x, y in zip(recall.x, recall.y, strict=True)]
        ),
    ]
    steps = range(0, int(loss.x[-1]) + 1, 100)
    y = numbered("share", 0, 105, range(0, 101, 20), " %")
    save(
        "learning",
        "Loss, accuracy and recall of a run",
        numbered("step", 0, loss.x[-1], steps),
        series,
        y,
    )


def draws(name: str) -> None:
    """R@1 of the same model on draws of some of the held-out images, and the interval that one of them tells."""
    request = EvaluationRequest(name, split="val", device="cpu")
    model = find_model(request)
    embedder = load(model.path, "cpu")
    config, _ = choose_data(model, request)
    images, texts, owner = embedder.encode_pairs(
        open_data(config, embedder.view, "val", "", None).pairs
    )
    rank, _ = ranks(images, texts, owner)
    hits = np.array([(rank[owner == image] == 1).mean() for image in range(len(images))])
    random = np.random.default_rng(0)
    drawn = [hits[random.permutation(len(hits))[:DRAWN]] for _ in range(DRAWS)]
    shares = [100 * float(one.mean()) for one in drawn]
    low, high = (100 * end for end in bootstrap_interval(drawn[0], np.ones(DRAWN)))
    whole = 100 * float(hits.mean())
    print(f"draws: the first of {DRAWN} images says {low:.1f} to {high:.1f} %")
    series = [
        Series(
            f"{DRAWN} of the images, drawn again and again",
            [Point(at, y) for at, y in enumerate(shares, 1)],
            False,
        ),
        Series(
            "the first draw, with the interval that it alone tells",
            [Point(1, shares[0], low, high)],
            False,
        ),
        dotless(f"all {len(hits)} images", [0, DRAWS + 1], [whole, whole]),
    ]
    y = numbered("R@1", 50, 100, range(50, 101, 10), " %")
    save(
        "draws",
        "Recall of one model on draws of images",
        numbered("draw", 0, DRAWS + 1, (1, 10, 20, 30, 40)),
        series,
        y,
    )


def over(title: str, numbers: Sequence[float]) -> Axis:
    return numbered(title, min(numbers) * 0.85, max(numbers) * 1.15, numbers, log=True)


def joined(numbers: Sequence[float], lines: dict[str, list[float]]) -> list[Series]:
    return [
        Series(name, [Point(*pair) for pair in zip(numbers, y, strict=True)])
        for name, y in lines.items()
    ]


def dotless(name: str, x: Sequence[float], y: Sequence[float]) -> Series:
    return Series(name, [Point(*pair) for pair in zip(x, y, strict=True)], dots=False)


def save(name: str, about: str, x: Axis, series: Sequence[Series], y: Axis = SHARES) -> None:
    for one in series:
        print(name, one.name, [(round(point.x, 1), round(point.y, 1)) for point in one.points][:8])
    (DOCS / f"{name}.svg").write_text(draw(about, x, y, series), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

"""Check the predicted text-to-image R@1 among 1,000 candidates against the measured one.

    python benchmarks/predicted_recall.py RUN ... [--data flickr8k] [--draws 20] [--first-seed 0]

Embeds the split val of the data once per run: at least 1,000 photos, of which the first 1,000 count.
Then draws 26, 100 and 300 photos with all their captions, predicts the R@1 among 1,000 from each
draw, and counts the intervals that hold the R@1 among all 1,000. Without --data it takes flickr8k
in the folder LAPCLIP_TEST_DATA, or the data of the run where that is not set. The last line is
JSON, the exit status 1 if fewer than 90 % of the intervals hold or are narrow enough.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lapclip.commands.evaluation_data import (
    EvaluationRequest,
    choose_data,
    find_model,
    open_data,
)
from lapclip.embedder import load
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.recall_estimate import REFERENCE_CANDIDATES, estimate_recall

WIDEST = {26: 0.30, 100: 0.18, 300: 0.12}  # candidates: greatest width of an interval
MIN_SHARE = 0.9  # of the draws that must hold, and be narrow enough


@dataclass(frozen=True)
class Embeddings:
    images: np.ndarray
    texts: np.ndarray
    image_of_caption: np.ndarray

    def select(self, images: np.ndarray) -> Embeddings:
        """Return these images (ascending rows) with all their captions."""
        captions = np.flatnonzero(np.isin(self.image_of_caption, images))
        owners = np.searchsorted(images, self.image_of_caption[captions])
        return Embeddings(self.images[images], self.texts[captions], owners)

    def caption_ranks(self) -> np.ndarray:
        return ranks(self.images, self.texts, self.image_of_caption)[0]


@dataclass(frozen=True)
class Check:
    run: str
    candidates: int
    truth: float
    held: int
    draws: int
    mean_width: float
    widest: float
    too_wide: int
    mean_prediction: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", default=default_data())
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.draws)
    checks = []
    for run in options.runs:
        everything = embed(run, options.data)
        for candidates in WIDEST:
            checks.append(check(run, everything, candidates, seeds))
            print(describe(checks[-1]), flush=True)
    held, draws = sum(each.held for each in checks), sum(each.draws for each in checks)
    narrow = draws - sum(each.too_wide for each in checks)
    print(f"held in {held} of {draws}; narrow enough in {narrow}")
    print(json.dumps([asdict(each) for each in checks]))
    return 0 if min(narrow, held) >= MIN_SHARE * draws else 1


def default_data() -> str | None:
    folder = os.environ.get("LAPCLIP_TEST_DATA")
    return str(Path(folder) / "flickr8k") if folder else None


def embed(run: str, data: str | None) -> Embeddings:
    request = EvaluationRequest(run, data, split="val")
    model = find_model(request)
    config, own = choose_data(model, request)
    embedder = load(model.path, "auto")
    fingerprint = (model.data_fingerprint or "") if own else None
    pairs = open_data(config, embedder.view, "val", fingerprint, None).pairs
    everything = Embeddings(*embedder.encode_pairs(pairs))
    if len(everything.images) < REFERENCE_CANDIDATES:
        sys.exit(f"{run}: the split val has {len(everything.images):,} images, not 1,000.")
    return everything.select(np.arange(REFERENCE_CANDIDATES))


def check(run: str, everything: Embeddings, candidates: int, seeds: range) -> Check:
    truth = float((everything.caption_ranks() == 1).mean())
    held, widths, predictions = 0, [], []
    for seed in seeds:
        shuffled = np.random.default_rng([seed, candidates]).permutation(REFERENCE_CANDIDATES)
        drawn = everything.select(np.sort(shuffled[:candidates]))
        estimate = estimate_recall(drawn.caption_ranks(), drawn.image_of_caption, candidates)
        assert estimate
        low, high = estimate.interval
        held += low <= truth <= high
        widths.append(high - low)
        predictions.append(estimate.recall)
    mean_width, mean_prediction = float(np.mean(widths)), float(np.mean(predictions))
    return Check(
        run=run,
        candidates=candidates,
        truth=truth,
        held=held,
        draws=len(seeds),
        mean_width=mean_width,
        widest=float(max(widths)),
        too_wide=sum(width > WIDEST[candidates] for width in widths),
        mean_prediction=mean_prediction,
    )


def describe(result: Check) -> str:
    return (
        f"{result.run}, {result.candidates} candidates: {result.held} of {result.draws} intervals "
        f"hold {result.truth:.1%}, mean prediction {result.mean_prediction:.1%}, "
        f"width {100 * result.mean_width:.1f} points (widest {100 * result.widest:.1f}, "
        f"{result.too_wide} over the limit of {100 * WIDEST[result.candidates]:.0f})"
    )


if __name__ == "__main__":
    sys.exit(main())
